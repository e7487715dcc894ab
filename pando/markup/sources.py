"""Files that modules name with `src`: read only below a directory that the operator named."""

from pathlib import Path

from .pml import Element, clipped


class Sources:
    def __init__(self, directory: Path | None, most: int) -> None:
        self._directory = None if directory is None else directory.resolve()
        self._left = most  # bytes, of all files together

    def read(self, element: Element) -> str:
        """The text of the file, as it is: source code keeps its indentation."""
        src = element.attributes["src"]
        if element.children:
            raise element.wrong("a module with both src and content; move the content into the file, or into a module of its own")
        if self._directory is None:
            raise element.wrong(
                f"src is {clipped(src)!r}, and no directory was named that files may be read from; write the text into the module"
            )
        try:
            path = (self._directory / src).resolve()
            if not path.is_relative_to(self._directory):
                raise element.wrong(
                    f"src is {clipped(src)!r}, which lies outside of the directory that files are read from; name a file below it"
                )
            return self._text(path, element)
        except (OSError, RuntimeError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "the path cannot be followed"
            raise element.wrong(f"src is {clipped(src)!r}, which cannot be read: {why}; name a file below the directory") from None

    def _text(self, path: Path, element: Element) -> str:
        src = clipped(element.attributes["src"])
        if not path.is_file():  # a pipe would be waited for
            raise element.wrong(f"src is {src!r}, and there is no such file; name one below the directory")
        with path.open("rb") as file:
            data = file.read(self._left + 1)
        if len(data) > self._left:
            raise element.wrong(
                f"src is {src!r}, and with it the files of this schema have more than the {self._left:,} bytes left; use less"
            )
        self._left -= len(data)
        try:
            return data.decode("utf-8-sig").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise element.wrong(f"src is {src!r}, which is not UTF-8 at byte {error.start}; save it as UTF-8") from None

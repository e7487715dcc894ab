"""Every error a user can meet.

    PandoError
    ├── InputError             the request, option or file is at fault: exit code 2, and nothing else is harmed
    │   ├── ModelNotFound        no such directory, file, repository or catalogue name
    │   ├── BadModelFile         there, but truncated, corrupt or not what it claims to be
    │   ├── UnsupportedModel     sound, but of an architecture, tensor type or feature that Pando does not run
    │   ├── PromptTooLong        more tokens than the context holds
    │   ├── InvalidPrompt        not text, not tokens of this model, or not a conversation its template accepts
    │   ├── InvalidSampling      sampling values that mean nothing
    │   ├── InvalidOption        an engine or command-line option that cannot work
    │   ├── PoolTooSmall         one request needs more pages than there are
    │   └── QuotaExceeded        more would be pinned than may be
    └── FetchFailed            a download did not complete; trying again may help

Each message says what is wrong, how much, and what to do about it.
"""


class PandoError(Exception):
    """The root: catch this to catch everything Pando raises on purpose."""


class InputError(PandoError):
    pass


class ModelNotFound(InputError):
    pass


class BadModelFile(InputError):
    pass


class UnsupportedModel(InputError):
    pass


class PromptTooLong(InputError):
    pass


class InvalidPrompt(InputError):
    pass


class InvalidSampling(InputError):
    pass


class InvalidOption(InputError):
    pass


class PoolTooSmall(InputError):
    pass


class QuotaExceeded(InputError):
    pass


class FetchFailed(PandoError):
    pass

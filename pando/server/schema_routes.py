"""The routes of schemas: registering PML, looking at it, and letting go of it."""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

from fastapi import FastAPI, Query
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ..engine.engine import Engine
from ..engine.request import Tenant
from ..engine.schemas import ModuleFacts, Schemas
from ..errors import InputError
from ..kv.run import Run
from ..markup.schema import Schema
from .bodies import whole_body
from .exchange import gone, unless_gone
from .limits import MAX_MODULES, Name, Real
from .replies import json_response
from .service import Service
from .tenants import Tenants
from .ticket import TimedOut
from .views import DeletedSchema, ModuleView, SchemaCard, SchemaList, SchemaView

GLANCE = 64  # modules that are looked up between two steps of the engine
PAUSE = 0.01  # seconds between two looks at what is being encoded
PML_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {kind: {"schema": {"type": "string", "description": "A schema in PML."}} for kind in ("text/xml", "text/plain")},
    }
}
Salt = Annotated[Name | None, Query(description="Whose states are meant, as in requests for answers.")]
Eager = Annotated[bool, Query(description="Encode all modules before answering; otherwise each is when it is first imported.")]
Repair = Annotated[
    Real | None, Query(ge=0, le=1, description="The share of module tokens that prompts have computed again, if they do not say.")
]


class Unfinished(TimedOut):
    """A schema is registered, and not all of it is encoded."""


class _Some(NamedTuple):
    """Runs that are encoded together."""

    runs: Sequence[Run]
    tenant: Tenant

    def encode(self, engine: Engine) -> int:
        return engine.encode(self.runs, self.tenant)

    def left(self, engine: Engine) -> int:
        return engine.unmade(self.runs, self.tenant)


class SchemaRoutes:
    def __init__(self, service: Service, tenants: Tenants) -> None:
        self.service, self.tenants = service, tenants

    def add_to(self, app: FastAPI, failures: dict[int | str, dict[str, Any]]) -> None:
        told: dict[int | str, dict[str, Any]] = {code: failures[code] for code in (400, 403, 408, 409, 429)}
        app.post("/v1/schemas", response_model=SchemaView, responses=told, tags=["schemas"], openapi_extra=PML_BODY)(self.register)
        app.get("/v1/schemas", response_model=SchemaList, tags=["schemas"])(self.schemas)
        app.get("/v1/schemas/{name}", response_model=SchemaView, tags=["schemas"])(self.schema)
        app.delete("/v1/schemas/{name}", response_model=DeletedSchema, responses={403: failures[403]}, tags=["schemas"])(self.delete)

    async def register(self, request: Request, eager: Eager = False, repair: Repair = None, cache_salt: Salt = None) -> Response:
        """Registers a schema in PML for this client's key. The same content again changes nothing but `repair`, where that is given."""
        self.service.check_ready()
        owner, tenant = request.state.owner, self.tenants.tenant(request.state.owner, cache_salt)
        try:
            body = await whole_body(request)
        except ClientDisconnect:  # in the middle of it: nothing is registered
            return gone()
        made = await self.service.register(owner, body, repair)
        try:
            left = eager and await unless_gone(request, self._encode(made, tenant)) is None
        except InputError:  # it cannot be encoded: whoever is told so need not delete it
            self.service.schemas.undo(owner, made)
            raise
        if left:
            self.service.schemas.undo(owner, made)
            return gone()
        return await self._shown(self.service.schemas.whose(owner, made), made, tenant)

    async def schemas(self, request: Request) -> Response:
        """The schemas of this client's key, and those that the operator registered for everyone."""
        self.service.check_ready()
        found = [self._card(schemas, schema) for schemas, schema in self.service.schemas.each(request.state.owner)]
        return json_response(SchemaList(object="list", data=found))

    async def schema(self, request: Request, name: str, cache_salt: Salt = None) -> Response:
        """One schema: its modules, and what of them is cached."""
        self.service.check_ready()
        found = self.service.schemas.find(request.state.owner, name)
        return await self._shown(*found, self.tenants.tenant(request.state.owner, cache_salt))

    async def delete(self, request: Request, name: str) -> Response:
        """Forgets a schema. Prompts that are being answered finish; what is cached goes when the room is needed."""
        self.service.check_ready()
        self.service.schemas.remove(request.state.owner, name)
        return json_response(DeletedSchema(name=name, deleted=True))

    async def _encode(self, schema: Schema, tenant: Tenant) -> bool:
        """Some at a time, so that other requests come in between."""
        service, end = self.service, time.perf_counter() + self.service.config.request_timeout
        size = max(1, service.max_rows // 2)
        for start in range(0, len(schema.stored), size):
            some = _Some(schema.stored[start : start + size], tenant)
            await service.ask_engine(some.encode)
            while await service.ask_engine(some.left):
                if time.perf_counter() > end:
                    raise Unfinished(
                        "encoding took longer than a request may; the schema is registered, and the rest is encoded on first use"
                    )
                await asyncio.sleep(PAUSE)
        return True

    async def _shown(self, schemas: Schemas, schema: Schema, tenant: Tenant) -> Response:
        """As it was found: meanwhile it may be deleted, and another have its name."""
        modules: list[ModuleView] = []
        listed = min(len(schema.modules), MAX_MODULES)
        for start in range(0, listed, GLANCE):
            look = partial(schemas.facts, schema, tenant, slice(start, min(start + GLANCE, listed)))
            modules += map(_module, await self.service.ask_engine(lambda _: look()))  # noqa: B023  # it is waited for
        size = self.service.bytes_of
        view: SchemaView = {
            **self._card(schemas, schema),
            "modules": modules,
            "truncated": len(schema.modules) > listed,
            "scaffolds": [{"modules": list(each.paths), "tokens": each.tokens, "bytes": size(each.runs)} for each in schema.scaffolds],
        }
        return json_response(view)

    def _card(self, schemas: Schemas, schema: Schema) -> SchemaCard:
        return {
            "name": schema.name,
            "object": "schema",
            "digest": schema.digest.hex(),
            "source": "operator" if schemas is self.service.schemas.common else "client",
            "layout": schema.layout,
            "encode": schema.encode,
            "order": schema.order,
            "repair": schemas.repair(schema),
            "tokens": sum(part.tokens for part in schema.modules),
            "bytes": self.service.bytes_of(schema.stored),
            "uses": schemas.uses(schema),
        }


def _module(fact: ModuleFacts) -> ModuleView:
    return {
        "path": fact.path,
        "encode": fact.encode,
        "tokens": fact.tokens,
        "bytes": fact.bytes,
        "state": fact.state,
        "uses": fact.uses,
    }

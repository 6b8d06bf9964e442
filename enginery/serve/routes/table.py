"""All routes of a server.

>>> route_table().find("POST", "/embed")[0].family
'tei'
"""

from __future__ import annotations

from enginery.serve.routes.admin import admin_routes
from enginery.serve.routes.oip_routes import oip_routes
from enginery.serve.routes.openai import openai_routes
from enginery.serve.routes.plain import plain_routes
from enginery.serve.routes.tei_routes import tei_routes
from enginery.serve.routing import Table


def route_table() -> Table:
    """The table of every server."""
    return Table([*oip_routes(), *tei_routes(), *openai_routes(), *plain_routes(), *admin_routes()])

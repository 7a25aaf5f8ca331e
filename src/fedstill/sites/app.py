"""The client app and the server app that ``flwr run`` starts (``flower_app/pyproject.toml``, docs/deploy.md)."""

from fedstill.engines.flower import apps
from fedstill.sites.server import serve

client_app = apps.client_app(serve.number, serve.answer)
server_app = apps.server_app(serve.serve)

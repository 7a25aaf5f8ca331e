"""What ``flwr run`` runs: the two components of pyproject.toml's ``[tool.flwr.app]`` (docs/deploy.md)."""

from fedstill.engines.flower import apps
from fedstill.sites import serve as deployed

client_app = apps.client_app(deployed.player)
server_app = apps.server_app(deployed.serve)

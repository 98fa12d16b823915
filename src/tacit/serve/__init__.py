"""Services: a model that adapts as it serves, and the ledger for a team.

Needs the extra `serve`: pip install 'tacit[serve]'.
"""

from tacit.serve._adapting import AdaptingModel, Facts, QueueFull, Rules
from tacit.serve._cluster import cluster_application
from tacit.serve._ledger_app import ledger_app
from tacit.serve._model_app import model_app
from tacit.serve._run import run_service
from tacit.serve._tokens import Role, Token, Tokens
from tacit.serve._tokens import tokens_of as tokens_of

__all__ = [
    "AdaptingModel",
    "Facts",
    "QueueFull",
    "Role",
    "Rules",
    "Token",
    "Tokens",
    "cluster_application",
    "ledger_app",
    "model_app",
    "run_service",
]

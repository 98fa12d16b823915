"""What training a source model came to, for people."""

from __future__ import annotations

from studies.dp_tta.source_model import Trained
from tacit.report.page import Section
from tacit.report.tables import Column, Table
from tacit.report.write import Findings


def render(trained: Trained) -> Findings:
    config = trained.config
    rows = [(config.images, trained.parameters, config.train.epochs, trained.accuracy)]
    columns = ("images", Column("parameters", ",d"), "epochs", Column(f"accuracy on {config.test} (%)", ".2f"))
    table = Table("Source model", columns, rows, note="Trained and tried on data declared public.")
    return Findings(
        title=config.title,
        lead=f"The weights are {trained.weights.name}.",
        sections=[Section("Training", tables=[table])],
        summary=[table],
        facts={"accuracy": trained.accuracy, "parameters": trained.parameters, "weights": trained.weights.name},
        not_covered=["everybody whose images the model was trained on: they were declared public"],
    )

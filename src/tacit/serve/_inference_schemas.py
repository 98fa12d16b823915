"""The Open Inference Protocol (version 2, REST), as far as a model with one input and one output needs it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

TYPES = {"FP32", "FP64", "FP16", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"}
LONGEST_ID = 200  # characters of a unit id


class InputTensor(BaseModel):
    """A tensor, its numbers flat or nested, in row-major order."""

    model_config = ConfigDict(extra="ignore")
    name: str = Field(max_length=200)
    shape: list[Annotated[int, Field(ge=0, le=2**31)]] = Field(min_length=1, max_length=8)
    datatype: str = Field(max_length=10)
    parameters: dict[str, Any] | None = None
    data: list[Any]


class InferenceRequest(BaseModel):
    """One or more rows; whose they are is said in `parameters.unit_id(s)`, or in the header X-Unit-Id for all."""

    model_config = ConfigDict(extra="ignore")
    id: str | None = Field(None, max_length=200)
    parameters: dict[str, Any] | None = None
    inputs: list[InputTensor] = Field(min_length=1, max_length=1)
    outputs: list[dict[str, Any]] | None = None


class OutputTensor(BaseModel):
    """The logits."""

    name: str
    shape: list[int]
    datatype: str
    data: list[float | None]


class InferenceResponse(BaseModel):
    """The predictions of one version of the model."""

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]


class Error(BaseModel):
    """Why not."""

    error: str

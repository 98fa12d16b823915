"""Modules under the names that they had before they became private; see ``_deprecation``."""

from __future__ import annotations

# package -> modules that are now called the same with an underscore
_PRIVATE = {
    "adapt": "adapter memory methods noise saving steps uncertainty views",
    "calibrate": (
        "answers calibrated calibrator files intervals measures methods outputs queries rows search "
        "simulation source statistics transport wire"
    ),
    "calibrate.federated": "messages transport",
    "": "checkpoints refusals",
    "data": "cache grouped records texts video_files video_layouts videos views",
    "data.shifts": "dice strengths tools",
    "finetune": (
        "account adaptive evaluation features language loop measures predictions queries reading sampling "
        "saving sources standardise subspace tasks updates zeroth_order"
    ),
    "gradients": (
        "batches clipping engine fallback grouping isolation losses norms numbers recorder remembered result "
        "spot synthetic units"
    ),
    "models": (
        "adapters blocks compatibility convert convnet heads initialise loading lora resnet saved selection "
        "texts video vit"
    ),
    "pretrain": "augment plan robust rows saving",
    "privacy": "budget chain decompose filters generators grids ledger noise queries receipts storage tilted totals",
    "tune": (
        "baselines finetuning line linear optuna_trials ray_runner repeat runners sampled search selection "
        "space subset trials"
    ),
}
_RENAMED = {
    "adapt.attendance": "adapt._participation",
    "adapt.forms": "adapt._privacy_config",
    "adapt.makers": "adapt._constructors",
    "calibrate.dealing": "calibrate._partition",
    "data.tabled": "data._tensor_records",
    "finetune.noises": "finetune._noise_schedules",
    "finetune.optimisers": "finetune._optimizers",
    "finetune.probing": "finetune._linear_probe",
    "gradients.handles": "gradients._traced_parameter",
    "gradients.learning": "gradients._validation",
    "gradients.pieces": "gradients._grad_factors",
    "gradients.watch": "gradients._parameter_swap",
    "privacy.dots": "privacy._pld_numerics",
    "privacy.loss": "privacy._pld",
    "privacy.state": "privacy._subject",
    "tune.equal": "tune._budget_split",
    "tune.parts": "tune._random_split",
    "tune.wosm": "tune._dp_adam_wosm",
}

MOVED = {f"tacit.{old}": f"tacit.{new}" for old, new in _RENAMED.items()} | {
    ".".join(filter(None, ("tacit", package, module))): ".".join(filter(None, ("tacit", package, f"_{module}")))
    for package, modules in _PRIVATE.items()
    for module in modules.split()
}

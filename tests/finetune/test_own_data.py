"""Data as people have it: loaders, folders, tables, data sets. Each gives the weights that plain tensors give."""

from __future__ import annotations

import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from by_hand import SEED, SUBJECT
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, WeightedRandomSampler, default_collate

from tacit._refusals import Refusal
from tacit.data import ImageFiles, ImageShape, TensorRecords, from_datasets, from_pandas
from tacit.finetune import DPGD, Evaluation, fit
from tacit.finetune._reading import to, where_of
from tacit.finetune._sources import as_records
from tacit.privacy import Budget, Ledger
from tacit.tune import Finetuning, Hyperparameters, train

COUNT = 24
PATIENTS = [f"p{i // 3}" for i in range(COUNT)]


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(COUNT, 4, generator=generator), torch.arange(COUNT) % 2


def weights(data: Any, features: int = 4, **more: Any) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(features, 5), nn.Tanh(), nn.Linear(5, 2))
    options: dict[str, Any] = {"optimizer": DPGD(steps=2), "epsilon": 2.0, "delta": 1e-5, "size": 8, "scheme": "full"}
    fitted = fit(model, data, seed=SEED, classes=2, **(options | more))
    return torch.cat([p.detach().flatten() for p in fitted.model.parameters()])


def by_patient(**more: Any) -> dict[str, Any]:
    return {"unit": "patient", "unit_ids": PATIENTS} | more


class Items:
    """Items of any kind."""

    def __init__(self, item: Any) -> None:
        self._item = item

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, place: int) -> Any:
        return self._item(place)


@pytest.mark.parametrize("form", ["pairs", "mappings", "collated", "workers", "subset"])
def test_a_loader(form: str) -> None:
    inputs, labels = rows()
    expected = weights((inputs, labels), **by_patient())
    pairs = TensorDataset(inputs, labels)
    loaders = {
        "pairs": DataLoader(pairs, batch_size=7, shuffle=True),  # its batches and their order say nothing here
        "mappings": DataLoader(Items(lambda i: {"x": inputs[i], "label": labels[i]}), batch_size=7),
        "collated": DataLoader(
            Items(lambda i: {"values": inputs[i].tolist(), "answer": int(labels[i])}),
            batch_size=7,
            collate_fn=lambda items: (
                torch.tensor([item["values"] for item in items]),
                torch.tensor([item["answer"] for item in items]),
            ),
        ),
        "workers": DataLoader(Items(lambda i: (inputs[i], labels[i])), num_workers=2),
        "subset": DataLoader(Subset(TensorDataset(inputs.repeat(2, 1), labels.repeat(2)), range(COUNT))),
    }
    assert torch.equal(weights(loaders[form], **by_patient()), expected)


def test_a_collate_function_sees_one_item_at_a_time() -> None:
    """Mixup would put several people into one row: alone, there is nobody to mix with."""
    inputs, labels = rows()
    seen = []

    def mixup(items: list[Any]) -> Any:
        seen.append(len(items))
        mixed, targets = default_collate(items)
        return mixed + mixed.roll(1, 0), targets

    mixed = weights(DataLoader(TensorDataset(inputs, labels), batch_size=8, collate_fn=mixup), **by_patient())
    assert set(seen) == {1}
    assert torch.equal(mixed, weights((2 * inputs, labels), **by_patient()))


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


def test_loaders_that_draw_by_themselves_are_refused() -> None:
    data = TensorDataset(*rows())
    for loader, match in (
        (DataLoader(data, sampler=WeightedRandomSampler([1.0] * COUNT, COUNT)), "has a sampler of its own"),
        (DataLoader(Endless()), "A stream"),
        (DataLoader(data, collate_fn=lambda _: (torch.zeros(3, 4), torch.zeros(3))), "one row for each item"),
        (DataLoader(data, collate_fn=lambda items: items[0][0]), "a mapping with 'label'"),
    ):
        with pytest.raises(Refusal, match=match):
            as_records(loader)


def test_a_typo_in_a_collate_function_or_a_transform_costs_nothing(ledger: Ledger) -> None:
    inputs, labels = rows()

    def collate(items: list[Any]) -> Any:
        return default_colate(items)  # type: ignore[name-defined]  # noqa: F821

    def transform(row: Tensor) -> Tensor:
        return row.norml(4711)  # type: ignore[attr-defined,no-any-return]

    for data in (
        DataLoader(TensorDataset(inputs, labels), collate_fn=collate),
        Items(lambda i: (transform(inputs[i]), labels[i])),
        DataLoader(Items(lambda i: (transform(inputs[i]), labels[i])), num_workers=1),
    ):
        with pytest.raises(Refusal, match="Nothing was charged") as caught:
            weights(data, ledger=ledger, subject="clinic", **by_patient())
        assert "4711" not in str(caught.value)
        assert ledger.get_subject("clinic") is None


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three files of each patient, in a folder per class."""
    pixels = np.random.default_rng(0).integers(0, 256, (COUNT, 9, 12, 3), dtype=np.uint8)
    for i, each in enumerate(pixels):
        folder = tmp_path / "photos" / ("well" if i % 2 else "ill")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(each).save(folder / f"{PATIENTS[i]}_{i:02}.png")
    lines = [
        f"{'well' if i % 2 else 'ill'}/{PATIENTS[i]}_{i:02}.png,{'well' if i % 2 else 'ill'},{PATIENTS[i]}"
        for i in range(COUNT)
    ]
    (tmp_path / "photos.csv").write_text("\n".join(["file,label,patient", *lines]) + "\n")
    return tmp_path / "photos"


SHAPE = ImageShape(height=6, width=6, mean=(0.5,), std=(0.25,))


def whose(file: str | Path) -> str:
    return Path(file).stem.split("_")[0]


def test_image_folders_and_tables(photos: Path) -> None:
    """The same patients by folder, by table and as tensors; the order of rows within a patient does not matter."""
    folder = ImageFiles.folder(photos, shape=SHAPE, owners=whose)
    assert folder.classes == ("ill", "well")
    assert folder.samples[0] == (str(photos / "ill" / "p0_00.png"), 0)
    table = ImageFiles.table(
        photos.parent / "photos.csv", photos, shape=SHAPE, classes=["ill", "well"], unit_ids="patient"
    )
    tensors = (torch.stack([table[i][0] for i in range(COUNT)]), torch.stack([table[i][1] for i in range(COUNT)]))
    expected = weights(tensors, 108, **by_patient())
    found = [weights(features=108, data=data, unit="patient") for data in (folder, table)]
    assert all(torch.allclose(each, expected, atol=1e-6) for each in found)
    by_function = weights(features=108, data=ImageFiles.folder(photos, shape=SHAPE), unit="patient", unit_ids=whose)
    assert torch.equal(by_function, found[0])


def test_torchvisions_image_folder_with_owners(photos: Path) -> None:
    folders = pytest.importorskip("torchvision.datasets.folder")

    def transform(image: Any) -> Tensor:
        return torch.from_numpy(np.array(image.resize((6, 6)))).permute(2, 0, 1).float() / 255

    dataset = folders.ImageFolder(str(photos), transform=transform)
    records = as_records(dataset, "patient", unit_ids=whose)  # type: ignore[arg-type]
    assert (len(records), records.unit, records.unit_ids) == (8, "patient", [f"p{i}" for i in range(8)])  # type: ignore[attr-defined]
    weights(features=108, data=DataLoader(dataset, num_workers=1), unit="patient", unit_ids=whose)
    half = as_records(Subset(dataset, range(12)), "patient", unit_ids=whose)  # type: ignore[arg-type]
    assert half.labels().tolist() == [0] * 12


def test_the_fingerprint_of_images_is_their_content(photos: Path) -> None:
    files = ImageFiles.folder(photos, shape=SHAPE)
    first, file = TensorRecords(files).fingerprint(), files.files[5]
    assert TensorRecords(ImageFiles.folder(photos, shape=SHAPE)).fingerprint() == first
    bigger = ImageFiles.folder(photos, shape=ImageShape(height=7, width=7))
    assert TensorRecords(bigger).fingerprint() != first
    Image.new("RGB", (12, 9), (1, 2, 3)).save(file)
    assert TensorRecords(ImageFiles.folder(photos, shape=SHAPE)).fingerprint() != first
    with pytest.raises(OSError, match="not what it was"):
        files[5]
    file.unlink()
    with pytest.raises(OSError, match="cannot be read"):
        files[5]
    with pytest.raises(OSError, match="No such file"):
        TensorRecords(files).fingerprint()


@pytest.mark.parametrize("scheme", ["full", "linear"])
def test_bytes_that_are_no_image_add_nothing_at_every_replay(photos: Path, tmp_path: Path, scheme: str) -> None:
    """They fail again when a step is replayed, so a run with checkpoint= need not stop."""
    (photos / "ill" / "p3_10.png").write_bytes(b"no image")
    options: dict[str, Any] = {"features": 108, "unit": "patient", "scheme": scheme}
    data = ImageFiles.folder(photos, shape=SHAPE, owners=whose)
    plain = weights(data, **options)
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        resumable = weights(data, ledger=ledger, subject=SUBJECT, checkpoint=tmp_path / "run", **options)
    assert torch.equal(resumable, plain)


def test_what_is_wrong_with_a_folder_or_a_table_is_said(photos: Path) -> None:
    for wrong, match in (
        (lambda: ImageFiles.folder(photos / "nowhere", shape=SHAPE), "no folder"),
        (lambda: ImageFiles.folder(photos / "ill", shape=SHAPE), "holds no image"),
        (lambda: ImageFiles.folder(photos, shape=SHAPE, classes=["ill", "wel"]), "did you mean 'well'"),
        (lambda: ImageFiles.folder(photos, shape=None), "Give shape="),
        (lambda: ImageFiles.folder(photos, shape=nn.Linear(2, 2)), "does not say what pictures"),
        (
            lambda: ImageFiles.table(photos.parent / "photos.csv", photos, shape=SHAPE, classes=2, unit_ids="pateint"),
            "did you mean 'patient'",
        ),
    ):
        with pytest.raises(Refusal, match=match):
            wrong()


def test_size_mean_and_std_come_from_the_model_and_are_printed(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False)
    files = ImageFiles.folder(photos, shape=model)
    assert files.shape == ImageShape(height=224, width=224, mean=(0.5,) * 3, std=(0.5,) * 3, crop=0.9)
    assert "Images as the model says: 3 x 224 x 224, crop 0.9, bicubic, mean 0.5, 0.5, 0.5" in capsys.readouterr().err


def test_size_mean_and_std_of_a_transformers_model(photos: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        image_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, patch_size=16
    )
    mean, std = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]
    size = {"height": 32, "width": 32}
    processor = transformers.ViTImageProcessor(size=size, image_mean=mean, image_std=std, resample=2)
    expected = ImageShape(height=32, width=32, mean=tuple(mean), std=tuple(std), resampling="bilinear")
    assert ImageShape.of(processor) == expected
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    model = transformers.ViTForImageClassification.from_pretrained(tmp_path / "model")
    assert ImageShape.of(model) == expected
    file = ImageFiles.folder(photos, shape=model).files[0]
    with Image.open(file) as image:
        square = image.convert("RGB").resize((32, 32))
        assert processor(square, return_tensors="pt")["pixel_values"].shape == (1, 3, 32, 32)


def test_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    inputs, labels = rows()
    frame = pandas.DataFrame(inputs.numpy(), columns=list("abcd"))
    frame["label"], frame["who"] = labels.numpy(), PATIENTS
    expected = weights((inputs, labels), **by_patient())
    assert torch.equal(weights(frame, unit="patient", unit_ids="who"), expected)
    assert torch.equal(weights((inputs, labels, frame["who"].to_numpy()), unit="patient"), expected)
    assert torch.equal(weights((inputs, labels), unit="patient", unit_ids=frame["who"]), expected)
    frame["label"] = ["ill" if label == 0 else "well" for label in labels.tolist()]
    named = from_pandas(frame, classes=["ill", "well"], unit_ids="who", unit="patient", rows_each=2)
    assert (named.labels().tolist(), named.most_rows, len(named)) == (labels.tolist(), 2, 8)
    for options, match in (
        ({"unit_ids": "whom"}, "did you mean 'who'"),
        ({"label": "lable"}, "did you mean 'label'"),
        ({"unit_ids": "who"}, "Labels are texts: give classes="),
        ({"classes": ["ill", "well"]}, "The column 'who' has no numbers"),
        ({"classes": ["ill", "dead"]}, "some labels are none of the classes"),
    ):
        with pytest.raises(Refusal, match=match):
            from_pandas(frame, **options)
    with pytest.raises(Refusal, match="these data have none"):
        weights((inputs, labels), unit="patient", unit_ids="who")


def test_pandas_with_files(photos: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(photos.parent / "photos.csv")
    options: dict[str, Any] = {"inputs": "file", "folder": photos, "shape": SHAPE, "unit_ids": "patient"}
    records = from_pandas(frame, classes=["ill", "well"], unit="patient", **options)
    table = ImageFiles.table(photos.parent / "photos.csv", photos, shape=SHAPE, classes=["ill", "well"])
    assert torch.equal(records.rows(torch.tensor([1]), None).inputs, torch.stack([table[i][0] for i in (3, 4, 5)]))


def test_datasets(photos: Path) -> None:
    datasets = pytest.importorskip("datasets")
    inputs, labels = rows()
    columns = {"x": inputs.tolist(), "label": labels.tolist(), "who": PATIENTS}
    dataset = datasets.Dataset.from_dict(columns)
    expected = weights((inputs, labels), **by_patient())
    assert torch.equal(weights(dataset, unit="patient", unit_ids="who"), expected)
    torched = dataset.with_format("torch").remove_columns("who")
    assert torch.equal(weights(torched, **by_patient()), weights((inputs, labels), **by_patient()))
    assert torch.equal(weights(DataLoader(torched), **by_patient()), weights((inputs, labels), **by_patient()))
    two = datasets.Dataset.from_dict(
        {"input_ids": [[1, 2], [3, 4]], "attention_mask": [[1, 1], [1, 0]], "labels": [0, 1]}
    )
    records = from_datasets(two)
    assert records.rows(torch.tensor([1]), None).inputs["input_ids"].tolist() == [[3, 4]]
    files = [str(file) for file in ImageFiles.folder(photos, shape=SHAPE).files]
    images = datasets.Dataset.from_dict({"photo": files, "label": [0, 1] * 12, "who": [whose(file) for file in files]})
    images = images.cast_column("photo", datasets.Image())
    records = from_datasets(images, unit_ids="who", unit="patient", shape=SHAPE)
    same = ImageFiles(files, [0, 1] * 12, shape=SHAPE)
    assert torch.equal(records.read(torch.tensor([4])), same[4][0][None])
    assert len(records) == 8
    with pytest.raises(Refusal, match="Give one split"):
        from_datasets(datasets.DatasetDict({"train": dataset}))
    ragged = datasets.Dataset.from_dict({"x": [[1.0], [1.0, 2.0]], "label": [0, 1]})
    with pytest.raises(Refusal, match="differ in length"):
        from_datasets(ragged)


@pytest.mark.parametrize(
    "kind",
    [list, np.array, lambda ids: np.array(ids, dtype=object), tuple],
    ids=["list", "array", "objects", "tuple"],
)
def test_string_ids_in_every_form(kind: Any) -> None:
    inputs, labels = rows()
    expected = weights((inputs, labels), unit="patient", unit_ids=torch.arange(COUNT) // 3)
    assert torch.equal(weights((inputs, labels), unit="patient", unit_ids=kind(PATIENTS)), expected)


def test_a_bfloat16_model_takes_float_rows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).bfloat16()
    inputs, labels = rows()
    found = [
        fit(
            net,
            (given, labels),
            optimizer=DPGD(steps=2),
            epsilon=2.0,
            delta=1e-5,
            size=COUNT,
            scheme="full",
            seed=SEED,
        ).model
        for net, given in ((deepcopy(model), inputs), (deepcopy(model), inputs.bfloat16()))
    ]
    assert all(p.dtype == torch.bfloat16 for p in found[0].parameters())
    assert all(torch.equal(a, b) for a, b in zip(found[0].parameters(), found[1].parameters(), strict=True))


def test_trials_of_a_search_take_the_same_data(photos: Path, ledger: Ledger) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 5), nn.Tanh(), nn.Linear(5, 2))
    loader = DataLoader(ImageFiles.folder(photos, shape=SHAPE, owners=whose))
    trainable = Finetuning(model, loader.dataset, size=8, classes=2, unit="patient")
    found = train(trainable, Hyperparameters(lr=0.1, steps=2), Budget(1.0, 1e-5), ledger=ledger, subject="clinic")
    assert found.guarantee.epsilon <= 1.0


FORMS: dict[str, Any] = {
    "arrays": lambda inputs, labels: (inputs.numpy(), labels.numpy()),
    "arrays of float64 and int32": lambda inputs, labels: (inputs.double().numpy(), labels.int().numpy()),
    "columns first, big-endian": lambda inputs, labels: (
        np.asfortranarray(inputs.numpy(), dtype=">f8"),
        labels.numpy(),
    ),
    "a frame and a series": lambda inputs, labels: (
        pd.DataFrame(inputs.numpy()),
        pd.Series(labels.numpy(), range(5, 29)),
    ),
    "float64": lambda inputs, labels: (inputs.double(), labels),
    "int32 labels": lambda inputs, labels: (inputs, labels.int()),
    "uint8 labels": lambda inputs, labels: (inputs, labels.byte()),
    "a loader of float64": lambda inputs, labels: DataLoader(
        TensorDataset(inputs.double(), labels.int()), batch_size=8
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_numbers_of_any_type(form: str) -> None:
    """Float32 numbers and small integers are exact in all of them, so the weights are the same to the last bit."""
    inputs, labels = rows()
    data = FORMS[form](inputs, labels)
    expected = weights((inputs, labels), evaluate=Evaluation(data=(inputs, labels), public=True), **by_patient())
    assert torch.equal(weights(data, evaluate=Evaluation(data=data, public=True), **by_patient()), expected)


def test_owners_of_an_array_are_its_units() -> None:
    inputs, labels = rows()
    arrays = inputs.numpy(), labels.numpy(), np.array(PATIENTS)
    assert torch.equal(weights(arrays, unit="patient"), weights((inputs, labels), **by_patient()))


def test_integers_stay_integers() -> None:
    tokens, pixels = np.arange(6, dtype=np.int64).reshape(3, 2), np.arange(6, dtype=np.uint8).reshape(3, 2)
    for inputs, dtype in ((tokens, torch.int64), (pixels, torch.uint8)):
        assert as_records((inputs, np.zeros(3, dtype=int))).rows(torch.arange(3), None).inputs.dtype == dtype
        moved = to(torch.from_numpy(inputs), where_of(nn.Linear(2, 2).double()))
        assert moved.dtype == dtype
    named = as_records(({"input_ids": tokens, "pixels": pixels}, np.zeros(3, dtype=int))).rows(torch.arange(3), None)
    assert [value.dtype for value in named.inputs.values()] == [torch.int64, torch.uint8]


def test_rows_of_a_model_in_several_types_keep_theirs() -> None:
    """Which of its layers reads the rows only the model knows; one that begins in half precision reads them so."""
    double, half = nn.Linear(2, 2).double(), nn.Linear(2, 2).bfloat16()
    rows = torch.randn(3, 2, dtype=torch.float64)
    assert to(rows, where_of(nn.Sequential(nn.Linear(2, 2), double))).dtype is torch.float64
    assert to(rows.bfloat16(), where_of(nn.Sequential(nn.Linear(2, 2), half))).dtype is torch.bfloat16
    assert to(rows, where_of(nn.Sequential(half, nn.Linear(2, 2)))).dtype is torch.bfloat16


def test_an_array_on_disk_stays_there(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", rows()[0].numpy())
    array = np.load(tmp_path / "rows.npy", mmap_mode="r")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records = TensorRecords(array, rows()[1])
    assert records.inputs.data_ptr() == array.ctypes.data


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ((np.array([["a"], ["b"]]), np.zeros(2)), r"Inputs are an array of type <U1, .* X\.astype\('float32'\)"),
        ((np.zeros((2, 1)), np.array(["well", "ill"])), r"Labels are an array of type <U4, .* classes from 0"),
    ],
    ids=["texts", "names of classes"],
)
def test_arrays_that_are_no_numbers_cost_nothing(data: Any, match: str, ledger: Ledger) -> None:
    with pytest.raises(Refusal, match=match):
        weights(data, ledger=ledger, subject="clinic")
    assert ledger.get_subject("clinic") is None

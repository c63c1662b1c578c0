"""Model folders: what is saved is loaded, any damage is named, and the hub's own file layout is read."""

import json
import shutil
import types

import huggingface_hub
import pytest
import torch

from diladiff import MaskedLM, files
from diladiff.data.vocabulary import train_tokenizer

FILES = ("README.md", "config.json", "manifest.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def folder(lm, tmp_path):
    """A saved model."""
    lm.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_saved_model_writes_the_same_texts(lm, folder):
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    again = MaskedLM.from_pretrained(folder, device="cpu")
    assert again.generate(2, steps=4).texts == lm.generate(2, steps=4).texts
    assert again.dtype == torch.float32
    assert again.identity["weights_sha256"] == lm.identity["weights_sha256"]
    assert again.identity["weights_sha256"] == files.sha256(folder / "model.safetensors")
    assert again.identity["source"] == str(folder)


def test_weights_are_stored_and_loaded_in_the_type_asked_for(lm, tmp_path):
    lm.save_pretrained(tmp_path / "small", dtype="bfloat16", card="# Mine\n")
    assert (tmp_path / "small" / "README.md").read_text() == "# Mine\n"
    assert json.loads((tmp_path / "small" / "config.json").read_text())["dtype"] == "bfloat16"
    full, half = (tmp_path / "full", tmp_path / "small")
    lm.save_pretrained(full)
    assert (half / "model.safetensors").stat().st_size < 0.7 * (full / "model.safetensors").stat().st_size
    assert MaskedLM.from_pretrained(half, device="cpu").dtype == torch.float32
    loaded = MaskedLM.from_pretrained(half, device="cpu", dtype="bfloat16")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.model.output.weight, lm.model.output.weight.bfloat16())


def test_a_run_folder_gives_its_model(lm, tmp_path):
    run = tmp_path / "run"
    lm.save_pretrained(run / "model")
    (run / "config.json").write_text("{}")
    assert MaskedLM.from_pretrained(run, device="cpu").generate(steps=3).texts == lm.generate(steps=3).texts


@pytest.mark.parametrize("name", FILES[1:])
def test_a_flipped_bit_is_named(folder, name):
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(ValueError, match=name):
        MaskedLM.from_pretrained(folder, device="cpu")


def test_the_model_card_may_be_edited(folder, lm):
    (folder / "README.md").write_text("# Mended by hand\n")
    assert MaskedLM.from_pretrained(folder, device="cpu").generate(steps=3).texts == lm.generate(steps=3).texts


def test_a_missing_file_is_named(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        MaskedLM.from_pretrained(folder, device="cpu")


def test_another_tokenizer_is_refused(folder, lm):
    train_tokenizer(["abc abd abe xyz"] * 3 + ["Other words than before, quite other words."] * 9, 280).save(folder)
    files.write_manifest(folder)
    with pytest.raises(ValueError, match="tokenizer: its vocab_size is 280, the model's 300"):
        MaskedLM.from_pretrained(folder, device="cpu")


def test_another_tokenizer_of_the_same_size_is_refused(folder, lm):
    saved = json.loads((folder / "config.json").read_text())
    saved["tokenizer"]["fingerprint"] = "0" * 16
    (folder / "config.json").write_text(json.dumps(saved))
    files.write_manifest(folder)
    with pytest.raises(ValueError, match="a model made with 0000000000000000"):
        MaskedLM.from_pretrained(folder, device="cpu")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"width": 32}, "has shape"),
        ({"layers": 3}, "has no tensor layers.2"),
        ({"layers": 1}, "has a tensor layers.1"),
        ({"size": 3}, "model.size: no such field"),
        ({"heads": 5}, "width is 16"),
    ],
)
def test_a_shape_that_does_not_fit_is_named(folder, change, words):
    saved = json.loads((folder / "config.json").read_text())
    saved["model"].update(change)
    (folder / "config.json").write_text(json.dumps(saved))
    files.write_manifest(folder)
    with pytest.raises(ValueError, match=words):
        MaskedLM.from_pretrained(folder, device="cpu")


def test_another_kind_of_folder_is_refused(folder):
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**saved, "kind": "autoencoder"}))
    files.write_manifest(folder)
    with pytest.raises(ValueError, match="is of kind 'autoencoder'"):
        MaskedLM.from_pretrained(folder, device="cpu")


def test_saving_never_removes_what_is_no_model(lm, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not a model folder"):
        lm.save_pretrained(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    lm.save_pretrained(tmp_path / "model")
    lm.save_pretrained(tmp_path / "model", card="again\n")
    assert (tmp_path / "model" / "README.md").read_text() == "again\n"


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(ValueError, match="does not exist: give a model folder"):
        MaskedLM.from_pretrained(tmp_path / "nothing", device="cpu")
    with pytest.raises(ValueError, match="holds neither"):
        MaskedLM.from_pretrained(tmp_path, device="cpu")
    with pytest.raises(ValueError, match="neither a folder nor a model that the hub gave"):
        MaskedLM.from_pretrained("someone/nothing-here", device="cpu")


def test_a_hub_name_is_read_from_the_hubs_own_layout(lm, folder, tmp_path, monkeypatch):
    """As huggingface_hub lays its cache out: refs/main names a commit, snapshots hold links to blobs."""
    cache = tmp_path / "hub"
    repository = cache / "models--someone--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "blobs").mkdir()
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        shutil.copy(path, repository / "blobs" / path.name)
        (snapshot / path.name).symlink_to(repository / "blobs" / path.name)
    (snapshot / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    original = huggingface_hub.snapshot_download

    def local(name, revision=None):
        return original(name, revision=revision, cache_dir=cache, local_files_only=True)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", local)
    loaded = MaskedLM.from_pretrained("someone/tiny", device="cpu")
    assert loaded.generate(steps=3).texts == lm.generate(steps=3).texts
    assert MaskedLM.from_pretrained("someone/tiny", device="cpu", revision=commit).dtype == torch.float32
    with pytest.raises(ValueError, match="someone/other"):
        MaskedLM.from_pretrained("someone/other", device="cpu")


def test_pushing_uploads_a_whole_model_folder(lm, monkeypatch):
    calls = []

    class Api:
        """What push_to_hub asks of the hub."""

        def create_repo(self, name, *, private, exist_ok):
            calls.append(("create", name, private, exist_ok))

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            files.verify(folder_path)
            calls.append(("upload", repo_id, sorted(path.name for path in folder_path.iterdir()), commit_message))
            assert "someone/tiny" not in (folder_path / "README.md").read_text()
            return types.SimpleNamespace(commit_url="address", __str__=lambda self: "address")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    lm.push_to_hub("someone/tiny", private=True, dtype="bfloat16")
    assert calls == [
        ("create", "someone/tiny", True, True),
        ("upload", "someone/tiny", sorted(FILES), "Upload model"),
    ]

"""Training of the latent-diffusion model in torch: the model, its losses and gradients, freezing, averaging."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from latent_reference import cross_entropy, predict
from latents import grammar_pairs, opened, unsettle
from support import assert_same_gradients

from crosstune.config.resolve.fit_compute import missing_compiler
from crosstune.core.errors import UserError
from crosstune.core.weights import averaged
from crosstune.recipes.latent_diffusion import torch_parts
from crosstune.recipes.latent_diffusion.pair_folder import PairFolder
from crosstune.recipes.latent_diffusion.settings import DecodeOptions, ModelSettings
from crosstune.recipes.latent_diffusion.torch_parts_blocks import FusedBlocks
from crosstune.recipes.latent_diffusion.torch_parts_model import LatentDiffusionModel
from crosstune.recipes.latent_diffusion.vocabulary import MASK, PAD

MODES = ["l2t", "t2l", "unconditional", "random"]
SETTINGS = ModelSettings(
    vocabulary=40,
    max_tokens=6,
    latent_dim=8,
    hidden_size=32,
    n_blocks=2,
    n_heads=2,
    cond_dim=32,
    latent_tokens=2,
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> PairFolder:
    return grammar_pairs(tmp_path_factory.mktemp("pairs") / "grammar")


def gradients(session: Any, window: Any) -> dict[str, torch.Tensor]:
    session.backward([session.prepare(batch) for batch in window])
    found = {name: master.grad.clone() for name, master in session.masters.masters.items()}
    session.discard()
    return found


def test_the_number_of_parameters_is_as_computed() -> None:
    model = LatentDiffusionModel(SETTINGS)
    assert sum(p.numel() for p in model.parameters()) == SETTINGS.num_parameters()
    guide = ModelSettings(
        vocabulary=30_525,
        max_tokens=2048,
        latent_dim=32,
        hidden_size=1024,
        n_blocks=24,
        n_heads=16,
        cond_dim=1024,
        latent_tokens=1,
    )
    assert 0.89e9 < guide.num_parameters() < 1e9


@pytest.mark.parametrize("mode", MODES)
def test_every_trained_weight_has_a_gradient(pairs: PairFolder, mode: str) -> None:
    """So that processes which average gradients need not search for weights without one."""
    recipe, session = opened(pairs, loss_type=mode)
    frozen = {name for name, p in session.model.named_parameters() if not p.requires_grad}
    assert bool(frozen) == (mode in ("l2t", "t2l"))
    assert any(name.startswith("latent_head") for name in frozen) == (mode == "l2t")
    assert any(name.startswith("length_out") for name in frozen) == (mode == "t2l")
    session.backward([session.prepare(batch) for batch in recipe.micro_batches(0)])
    missing = [name for name, p in session.model.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing


@pytest.mark.parametrize("mode", MODES)
def test_two_micro_batches_equal_one_large_batch(pairs: PairFolder, mode: str) -> None:
    whole, session = opened(pairs, loss_type=mode, batch_size=16)
    unsettle(session.model)
    halves, _ = opened(pairs, loss_type=mode, batch_size=8, gradient_accumulation_steps=2)
    assert [batch.weight for batch in halves.micro_batches(3)] == [8, 8]
    one, two = gradients(session, whole.micro_batches(3)), gradients(session, halves.micro_batches(3))
    assert_same_gradients(two, one)


def test_checkpointed_gradients_equal_plain_ones(pairs: PairFolder) -> None:
    recipe, session = opened(pairs, loss_type="random")
    unsettle(session.model)
    plain = gradients(session, recipe.micro_batches(0))
    session.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls: list[int] = []
    hook = session.model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    again = gradients(session, recipe.micro_batches(0))
    hook.remove()
    assert len(calls) == 2  # forward, and once more in the backward pass
    for name in plain:
        torch.testing.assert_close(again[name], plain[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(("mode", "checkpointing"), [("l2t", False), ("t2l", True), ("random", True)])
def test_leaving_padding_out_gives_the_same_losses_and_gradients(
    pairs: PairFolder, mode: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_parts, "_WORTH_SKIPPING", 0.01)
    recipe, session = opened(pairs, loss_type=mode, use_gradient_checkpointing=checkpointing)
    unsettle(session.model)
    window = recipe.micro_batches(0)
    padded, of_padded = session.evaluate(window), gradients(session, window)
    session.task.skips_padding = session.model.aligns_logits = True
    assert "real_row" in session.prepare(window[0]).arrays
    found, of_found = session.evaluate(window), gradients(session, window)
    assert found.loss == pytest.approx(padded.loss, rel=1e-5)
    assert found.metrics == pytest.approx(padded.metrics, rel=1e-5, nan_ok=True)
    assert_same_gradients(of_found, of_padded)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("l2t", {"latent_tokens": 1}),
        ("t2l", {"use_gradient_checkpointing": True}),
        ("random", {"latent_tokens": 2, "hidden_size": 48, "n_heads": 3}),
    ],
)
def test_fused_blocks_give_the_same_losses_and_gradients(
    pairs: PairFolder, mode: str, options: dict[str, Any]
) -> None:
    recipe, session = opened(pairs, loss_type=mode, **options)
    unsettle(session.model)
    window = recipe.micro_batches(0)
    general, of_general = session.evaluate(window), gradients(session, window)
    session.model.fused = FusedBlocks(session.model)
    found, of_found = session.evaluate(window), gradients(session, window)
    assert found.loss == pytest.approx(general.loss, rel=1e-5)
    assert found.metrics == pytest.approx(general.metrics, rel=1e-5, nan_ok=True)
    assert_same_gradients(of_found, of_general)
    batch = session.prepare(window[0])
    with session.task.general_layers():  # takes batches that were prepared for the fused blocks
        assert session.backward([batch]).loss == pytest.approx(general.loss, rel=1e-5)


def test_fused_blocks_follow_updates(pairs: PairFolder) -> None:
    """Their copies of the weights are made again after each update."""
    found = []
    for kernels in ("general", "fast"):
        recipe, session = opened(pairs, loss_type="random", kernels=kernels)
        assert (session.model.fused is not None) == (kernels == "fast")
        losses = []
        for step in range(3):
            window = [session.prepare(batch) for batch in recipe.micro_batches(step)]
            losses.append(session.backward(window).loss)
            session.update(lr=1e-2)
        found.append(losses)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)


def test_attention_that_holds_its_scores_gives_the_same_losses(pairs: PairFolder) -> None:
    found = []
    for fused in (None, False):
        recipe, session = opened(pairs, loss_type="random", use_flash_attention=fused)
        unsettle(session.model)
        assert all(block.fuses_attention == (fused is None) for block in session.model.blocks)
        found.append(gradients(session, recipe.micro_batches(0)))
    assert_same_gradients(found[1], found[0])


@pytest.mark.slow
@pytest.mark.skipif(missing_compiler("cpu") is not None, reason="no C++ compiler here")
def test_compiled_blocks_train_alike_and_a_second_training_compiles_nothing(
    pairs: PairFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_parts, "_WORTH_SKIPPING", 0.01)
    counters = torch._dynamo.utils.counters
    counters.clear()

    def losses(**options: Any) -> list[float]:
        recipe, session = opened(pairs, n_blocks=3, **options)
        session.task.skips_padding = session.model.aligns_logits = True
        found = []
        for step in range(4):
            found.append(
                session.backward([session.prepare(batch) for batch in recipe.micro_batches(step)]).loss
            )
            session.update(lr=1e-3)
        session.task.sampler().decode(recipe.train.latents[:4], options=DecodeOptions(steps=2))
        return found

    plain = losses()
    assert losses(torch_compile=True) == pytest.approx(plain, rel=1e-5)
    made = counters["stats"]["unique_graphs"]
    assert 0 < made <= 2, "one program for all blocks but the last, whose latent is not predicted"
    assert not counters["graph_break"]
    assert losses(torch_compile=True) == pytest.approx(plain, rel=1e-5)
    assert counters["stats"]["unique_graphs"] == made


@pytest.mark.parametrize(("kind", "latent_loss"), [("x0", "cosine"), ("v", "mse"), ("epsilon", "cosine")])
def test_the_losses_are_those_of_an_independent_model(pairs: PairFolder, kind: str, latent_loss: str) -> None:
    """All rows of a step with every mode and dropped conditions, in numpy, in fp64 and without padding."""
    recipe, session = opened(
        pairs,
        loss_type="random",
        mode_weights="l2t:1,t2l:1,unconditional:1",
        cfg_dropout_prob=0.3,
        latent_parameterization=kind,
        latent_loss=latent_loss,
        latent_loss_weight=0.7,
        text_loss_weight=1.3,
    )
    unsettle(session.model)
    [batch] = recipe.micro_batches(2)
    with torch.no_grad():
        loss, sums = session.task.loss(session.model, session._to_device(session.prepare(batch)))
    weights = {name: tensor.double().numpy() for name, tensor in session.model.state_dict().items()}
    shape = {"heads": recipe.settings.n_heads, "blocks": 2, "latent_tokens": recipe.settings.latent_tokens}
    text, bound, right, lengths, vectors, tokens = [], [], [], [], [], 0
    for place in range(batch.weight):
        count, time = int(batch.lengths[place]), float(batch.latent_time[place])
        masked, ids = batch.masked[place, :count], batch.tokens[place, :count]
        row = {
            "tokens": np.where(masked, MASK, ids),
            "latent": batch.noisy[place].astype(np.float64),
            "text_time": float(batch.text_time[place]),
            "latent_time": time,
            "without_latent": bool(batch.without_latent[place]),
        }
        found = predict(weights, row, **shape)
        if batch.text_factor[place] > 0:
            each = [cross_entropy(found["logits"][n], int(ids[n])) for n in np.flatnonzero(masked)]
            text += each
            bound += [value / row["text_time"] for value in each]
            right += [found["logits"][n].argmax() == ids[n] for n in np.flatnonzero(masked)]
            lengths.append(cross_entropy(found["length"], count - 1))
            tokens += count
        if batch.latent_factor[place] > 0:
            alpha, sigma = math.cos(math.pi / 2 * time), math.sin(math.pi / 2 * time)
            clean, noise = batch.latents[place].astype(np.float64), batch.noise[place].astype(np.float64)
            target = {"x0": clean, "epsilon": noise, "v": alpha * noise - sigma * clean}[kind]
            near = found["latent"] @ target / np.linalg.norm(found["latent"]) / np.linalg.norm(target)
            error = ((found["latent"] - target) ** 2).mean()
            vectors.append(1 - near if latent_loss == "cosine" else error)
    expected = 1.3 * (np.mean(text) + 0.1 * np.mean(lengths)) + 0.7 * np.mean(vectors)
    assert float(loss) / batch.weight == pytest.approx(expected, rel=1e-4)
    means = {name: float(total) / float(weight) for name, (total, weight) in sums.items()}
    assert means["text_loss"] == pytest.approx(np.mean(text), rel=1e-4)
    assert means["nats_per_token"] == pytest.approx(np.sum(bound) / tokens, rel=1e-4)
    assert means["text_accuracy"] == pytest.approx(np.mean(right))
    assert means["latent_loss"] == pytest.approx(np.mean(vectors), rel=1e-4)


def test_padding_changes_nothing_and_the_latent_does() -> None:
    torch.manual_seed(0)
    model = LatentDiffusionModel(SETTINGS).eval()
    unsettle(model)
    tokens = torch.tensor([[5, MASK, 7, PAD, PAD, PAD], [MASK, 9, 8, 11, MASK, 13]])
    lengths, latents, time = torch.tensor([3, 6]), torch.randn(2, 8), torch.tensor([0.3, 0.6])
    with torch.no_grad():
        first = model(tokens, lengths, latents, time, torch.zeros(2))
        tokens[0, 3:] = 20
        same = model(tokens, lengths, latents, time, torch.zeros(2))
        other = model(tokens, lengths, latents.flip(0), time, torch.zeros(2))
        null = model(tokens, lengths, latents, time, torch.zeros(2), torch.tensor([True, True]))
        null_again = model(tokens, lengths, latents.flip(0), time, torch.zeros(2), torch.tensor([True, True]))
    torch.testing.assert_close(same.logits[0, :3], first.logits[0, :3])
    torch.testing.assert_close(same.latent, first.latent)
    assert (other.logits[0, :3] - first.logits[0, :3]).abs().max() > 1e-3
    torch.testing.assert_close(null.logits, null_again.logits)


def test_the_average_is_evaluated_and_the_weights_go_on(pairs: PairFolder) -> None:
    recipe, session = opened(pairs, ema_decay=0.5)
    by_hand: dict[str, torch.Tensor] = {}
    for step in range(4):
        session.backward([session.prepare(batch) for batch in recipe.micro_batches(step)])
        session.update(lr=1e-2)
        for name, master in session.masters.masters.items():
            before = by_hand.get(name, master.detach().clone())
            by_hand[name] = torch.lerp(before, master.detach(), 0.5)
    weights = {name: master.detach().clone() for name, master in session.masters.masters.items()}
    with averaged(session):
        for name, master in session.masters.masters.items():
            torch.testing.assert_close(master.detach(), by_hand[name], msg=name)
    for name, master in session.masters.masters.items():
        torch.testing.assert_close(master.detach(), weights[name], rtol=0, atol=0)
    assert set(session.export_state().moments["average"]) == set(weights)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"latent_dim": 32}, "have 96 dimensions"),
        ({"context_length": 8}, "longer than --context_length 8"),
        ({"train_type": "lora"}, "no base for an adapter"),
        ({"hidden_size": 33}, "does not divide into"),
    ],
)
def test_data_and_options_that_do_not_fit(pairs: PairFolder, options: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        opened(pairs, **options)


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["l2t", "random"])
def test_fused_blocks_on_a_gpu_give_the_same_gradients(pairs: PairFolder, mode: str) -> None:
    recipe, session = opened(
        pairs, backend="cuda", precision="fp32", kernels="fast", loss_type=mode, hidden_size=96, n_heads=3
    )
    unsettle(session.model)
    window = recipe.micro_batches(0)
    of_fused = gradients(session, window)
    with session.task.general_layers():
        assert_same_gradients(of_fused, gradients(session, window))


@pytest.mark.cuda
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_that_leaves_padding_out_learns_as_the_cpu(
    pairs: PairFolder, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_parts, "_WORTH_SKIPPING", 0.01)
    found = []
    for backend in ("cpu", "cuda"):
        on_gpu = backend == "cuda"
        recipe, session = opened(
            pairs,
            backend=backend,
            loss_type="random",
            ema_decay=0.9,
            torch_compile=compiled and on_gpu,
            kernels="general",
        )
        losses = []
        for step in range(10):
            window = [session.prepare(batch) for batch in recipe.micro_batches(step)]
            assert ("real_row" in window[0].arrays) == on_gpu
            losses.append(session.backward(window).loss)
            session.update(lr=1e-3)
        found.append([*losses, recipe.evaluate(session, observer=lambda event: None).metrics["loss"]])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-3)


@pytest.mark.cuda
def test_bf16_on_a_gpu_learns_as_fp32_on_the_cpu(pairs: PairFolder) -> None:
    """fp32 weights, computing in bf16: the same steps give nearly the same losses, and decode."""
    found = []
    for backend, precision in (("cpu", "fp32"), ("cuda", "bf16_autocast")):
        recipe, session = opened(
            pairs, backend=backend, precision=precision, loss_type="random", hidden_size=64
        )
        assert all(p.dtype == torch.float32 for p in session.model.parameters())
        losses = []
        for step in range(20):
            losses.append(
                session.backward([session.prepare(batch) for batch in recipe.micro_batches(step)]).loss
            )
            session.update(lr=1e-3)
        tokens = (
            session.task.sampler().decode(recipe.train.latents[:4], options=DecodeOptions(steps=2)).tokens
        )
        assert (tokens != MASK).all()
        found.append(losses)
    np.testing.assert_allclose(found[1], found[0], rtol=0.02)

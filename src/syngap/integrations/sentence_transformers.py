"""`syngap.protect` in the trainer of sentence-transformers: old embeddings stay where they are."""

from __future__ import annotations

from typing import Any

from sentence_transformers import SentenceTransformerTrainer
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal
from torch.nn.functional import normalize

from syngap.integrations.transformers import SynGAPTrainer

__all__ = ["ProtectedSentenceTransformerTrainer"]

_TEMPERATURE = 0.05  # of the cosine in the ranking losses of sentence-transformers


class ProtectedSentenceTransformerTrainer(SynGAPTrainer, SentenceTransformerTrainer):
    """A SentenceTransformerTrainer that keeps the embeddings of known sentences.

    What the model predicts for a sentence is a normal distribution around its embedding, scaled to
    length 1. Its KL to the former one is (1 - cosine) / 0.05, where 0.05 is the temperature that
    MultipleNegativesRankingLoss divides cosines by.

    Args:
        *args: what SentenceTransformerTrainer takes.
        protect: sentences like those that the model knows, or options of `syngap.protect` with
            them as "known", or what `syngap.protect` returned. Another view of the embedding, such
            as one whose length counts, is an option `predict`.
        **kwargs: what SentenceTransformerTrainer takes.

    Examples:
        >>> trainer = ProtectedSentenceTransformerTrainer(
        ...     model, args, train_dataset=pairs, loss=loss, protect=sentences
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
        >>> print(trainer.protection.report())  # doctest: +SKIP
    """

    def __init__(self, *args: Any, protect: Any, **kwargs: Any) -> None:
        super().__init__(*args, protect=protect, **kwargs)

    def known_batches(self, known: Any) -> Any:
        """Return sentences as batches of tokens; what is none is taken as it is."""
        known = list(known)
        if not all(isinstance(text, str) for text in known):
            return known
        size = self.args.per_device_eval_batch_size
        batches = [
            self.model.preprocess(known[first : first + size])
            for first in range(0, len(known), size)
        ]
        return [
            {name: value for name, value in batch.items() if isinstance(value, Tensor)}
            for batch in batches
        ]

    def known_prediction(self, batch: Any) -> Tensor | Distribution:
        """Return a normal distribution around each embedding."""
        embedding = self.model(dict(batch))["sentence_embedding"].float()
        return Independent(Normal(normalize(embedding, dim=-1), _TEMPERATURE**0.5), 1)

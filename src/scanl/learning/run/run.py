"""A training run before its first step."""

from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from scanl.data.base import PackedDocuments
from scanl.data.splits import PARTS
from scanl.errors import ConfigError
from scanl.learning.questions import answerer
from scanl.learning.report import ScoreReport
from scanl.learning.run.config import (
    TrainConfig,
    check_accelerator,
    check_reach,
    fitting_precision,
    make_algorithm,
    seeded_model,
    update_steps,
)
from scanl.learning.run.folder import RunFolder

if TYPE_CHECKING:  # importing Lightning takes seconds
    import lightning.pytorch as pl

    from scanl.learning.run.callbacks import Clock, Keeper, Recorder


class Run:
    """A configuration, and what is made of it: the source, the model and the trainer. Each is made once.

    The constructor checks the options and the data, and fills in what `auto` stands for. It writes nothing.
    folder: where the results go; None for a run that leaves none.
    """

    def __init__(self, config: TrainConfig, folder: RunFolder | None = None) -> None:
        config.check()
        check_accelerator(config.run.accelerator)
        if config.training.steps is None and config.training.minutes is None:
            config.training.steps = 1000
        if config.run.precision == "auto":
            config.run.precision = fitting_precision(config.run.accelerator)
        self.config, self.folder = config, folder
        self.source = config.open_source()
        self.model = seeded_model(config, self.source.question)
        self._check_fit()
        self.source.check()
        self._check_parts()
        self._check_length()
        self.algorithm = make_algorithm(config, self.source)
        if not config.in_one_segment:
            self._check_algorithm()
        self.report = ScoreReport.of(self.source)
        self.report.check_reachable(config.run.until, config.entry.name)

    def _check_fit(self) -> None:
        """Raise ConfigError for options that do not fit the source."""
        config, packed = self.config, isinstance(self.source, PackedDocuments)
        if config.run.sequence_parallel > 1 and (packed or not answerer(self.source.question).divisible):
            why = "packs several documents into a row" if packed else "asks for other answers than the next token"
            raise ConfigError(
                f"train: sequence_parallel is {config.run.sequence_parallel}, expected 1 because {config.entry.name} "
                f"{why}"
            )
        if packed and not config.in_one_segment:
            raise ConfigError(
                f"train: algorithm is {config.training.algorithm}, expected bptt, in one segment, because the rows of "
                f"{config.entry.name} are packed from several documents"
            )

    def _check_length(self) -> None:
        """Raise ConfigError for layers that cannot read the longest sequence of the measurements."""
        longest = self.model.stack.longest
        if longest is None:
            return
        measured = (self.source.unseen(0), self.source.exam(sample=True).examples)
        steps = max(batch.length for batch in chain([self.source.batch(0, 1)], *measured))
        check_reach(
            "train", self.config.stack.layer, longest, steps, f"{self.config.entry.name} is read in such sequences"
        )

    def _check_parts(self) -> None:
        """Raise ConfigError for a table without series to measure while steps are taken, or at the end."""
        for split in self.source.empty_parts:
            raise ConfigError(
                f"train: {PARTS[split]} is 0, expected more because steps are measured on that part; leave out the "
                "options of training to let a model be chosen"
            )

    def _check_algorithm(self) -> None:
        """Raise ConfigError, before anything is written, for a model or sequences that the algorithm cannot learn."""
        steps, question = update_steps(self.config, self.algorithm), self.source.question
        if steps is not None:
            what = "the layer reads both ways" if self.model.stack.bidirectional else None
            what = what if answerer(question).in_parts else "the question is a forecast"
            if what is not None:
                raise ConfigError(
                    f"train: {self.algorithm.name} makes updates of {steps} steps, expected whole sequences because "
                    f"{what}; take bptt"
                )
        batch = self.source.batch(0, 1).tensors()
        try:
            self.algorithm.init(self.model, 1)
            self.algorithm.check(
                self.model, batch if steps is None else batch.part(0, steps, gradual=self.algorithm.gradual)
            )
        except RuntimeError as error:
            if "allocate" not in str(error):
                raise
            raise ConfigError(
                f"train: {self.algorithm.name} keeps more numbers for {self.config.stack.layer} than there is memory; "
                "`scanl algorithms` says how many"
            ) from error

    @cached_property
    def callbacks(self) -> "tuple[Recorder, Clock, Keeper]":
        """Callbacks that write the results, turn minutes into steps, and save checkpoints."""
        from scanl.learning.run.callbacks import Clock, Keeper, Recorder

        assert self.folder is not None
        return Recorder(self.folder, self.report), Clock(), Keeper(self.folder)

    @cached_property
    def trainer(self) -> "pl.Trainer":
        """Lightning's trainer; made on first use. Raises ConfigError for options that Lightning refuses."""
        from scanl.learning.run.trainer import make_trainer

        return make_trainer(self.config, callbacks=self.callbacks, folder=self.folder)

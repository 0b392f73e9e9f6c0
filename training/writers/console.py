"""The metrics writer `console`: a progress bar on a terminal, and lines of metrics."""

from collections import deque
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from training.logs import log
from training.writers.registry import MetricsWriter, WriterContext, register

# What the bar calls the phases and labels of `Goodput.spend`; others keep their name.
_PHASES = {
    "compile": "compiling",
    "step": "training",
    "evaluation": "evaluating",
    "sample": "sampling",
    "checkpoint": "saving",
}


def find_terminal() -> Console | None:
    """Return the terminal that stdout is; None if output goes to a file or a pipe."""
    console = Console()
    return console if console.is_terminal else None


@register("console")
class ConsoleWriter(MetricsWriter):
    """Logs a line with the means since the last one.

    On a terminal, a bar shows what the run does, its loss and rate, and the remaining time.
    """

    def __init__(self, context: WriterContext):
        self._context, self._first_step = context, 1
        self._step_times: list[float] = []
        self._recent_times = deque[float](maxlen=50)
        self.progress: Progress | None = None
        """The bar; None if output is a plain log."""
        if context.console is not None:
            self.progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rates]}"),
                TextColumn("[cyan]{task.fields[eta]}"),
                console=context.console,
                transient=True,
            )
            self._task = self.progress.add_task("starting", total=context.steps, rates="", eta="")

    def begin(self, resumed_step: int) -> None:
        """Show the bar, and count from the resumed step."""
        self._first_step = resumed_step + 1
        self._step_times.clear()
        self._recent_times.clear()
        if self.progress is not None:
            self.progress.update(self._task, completed=resumed_step)
            self.progress.start()

    def show_phase(self, label: str) -> None:
        """Show on the bar what the run does."""
        # The wait for a batch is most often too short to be read.
        if self.progress is not None and label != "data_wait":
            self.progress.update(self._task, description=_PHASES.get(label, label))

    def preview(self, step: int, values: Mapping[str, float]) -> None:
        """Log the first step, the last one, and every `log_every`-th."""
        last_step = self._context.steps
        self._step_times.append(values["step_time"])
        self._recent_times.append(values["step_time"])
        mean = sum(self._recent_times) / len(self._recent_times)
        minutes, seconds = divmod(round((last_step - step) * mean), 60)
        eta = f"eta {minutes}:{seconds:02d}"
        if self.progress is not None:
            rates = f"loss {values['loss']:.4f}  {values['tokens_per_second']:,.0f} tok/s"
            self.progress.update(self._task, completed=step, rates=rates, eta=eta)
        if step % self._context.log_every and step not in (self._first_step, last_step):
            return
        step_time = sum(self._step_times) / len(self._step_times)
        self._step_times.clear()
        # The other metrics are of this step alone; rates are scaled to the mean step time.
        scale = values["step_time"] / step_time
        mfu = f"  mfu {values['mfu'] * scale:.1%}" if "mfu" in values else ""
        data_wait = f"  data_wait {values['data_wait']:.0%}" if values["data_wait"] > 0.02 else ""
        of_objective = "".join(
            f"{shown.format(values[name])}  "
            for name, shown in self._context.console_metrics.items()
        )
        log.info(
            f"step {step:>{len(str(last_step))}}/{last_step}  loss {values['loss']:.4f}  "
            f"{of_objective}grad {values['grad_norm']:.2f}  lr {values['learning_rate']:.1e}  "
            f"{values['tokens_per_second'] * scale:,.0f} tok/s  {step_time:.3f} s/step{mfu}"
            f"{data_wait}  {eta}"
        )

    def close(self) -> None:
        """Remove the bar."""
        if self.progress is not None:
            self.progress.stop()

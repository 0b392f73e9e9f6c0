"""The metrics writer `console`: a progress bar on a terminal, and lines of metrics."""

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from training.logs import log
from training.writers.registry import MetricsWriter, WriterContext, register


def find_terminal() -> Console | None:
    """Return the terminal that stdout is; None if output goes to a file or a pipe."""
    console = Console(soft_wrap=True)
    return console if console.is_terminal else None


@register("console")
class ConsoleWriter(MetricsWriter):
    """Logs a line with the means since the last one; shows progress and remaining time."""

    def __init__(self, context: WriterContext):
        self._context, self._first_step = context, 1
        self._step_times: list[float] = []
        self._progress: Progress | None = None
        if context.console is not None:
            self._progress = Progress(
                TextColumn("[bold]training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=context.console,
            )
            self._task = self._progress.add_task("", total=context.steps)

    def begin(self, resumed_step: int) -> None:
        """Show the bar, and count from the resumed step."""
        self._first_step = resumed_step + 1
        self._step_times.clear()
        if self._progress is not None:
            self._progress.update(self._task, completed=resumed_step)
            self._progress.start()

    def preview(self, step: int, values: Mapping[str, float]) -> None:
        """Log the first step, the last one, and every `log_every`-th."""
        last_step = self._context.steps
        self._step_times.append(values["step_time"])
        if self._progress is not None:
            self._progress.update(self._task, completed=step)
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
        minutes, seconds = divmod(round((last_step - step) * step_time), 60)
        log.info(
            f"step {step:>{len(str(last_step))}}/{last_step}  loss {values['loss']:.4f}  "
            f"{of_objective}grad {values['grad_norm']:.2f}  lr {values['learning_rate']:.1e}  "
            f"{values['tokens_per_second'] * scale:,.0f} tok/s  {step_time:.3f} s/step{mfu}"
            f"{data_wait}  eta {minutes}:{seconds:02d}"
        )

    def close(self) -> None:
        """Remove the bar."""
        if self._progress is not None:
            self._progress.stop()

"""Tasks with their names in a trace of :mod:`jax.profiler`; costs nothing while no trace is taken.

While names are wanted a stage's threads call another ``launch``, which encloses the task in an annotation with its
name, ``2F5``, and its step. Where one thread launches and waits the annotation is as long as the task; where another
thread waits it is as long as the launch, and the device's own lines show the rest.
"""

from jax.profiler import TraceAnnotation

from rrfp_jax.runtime.compute import Launch
from rrfp_jax.runtime.executor import Launched
from rrfp_jax.schedules import Task


def named(launch: Launch, *, until_ended: bool) -> Launch:
    """``launch`` with an annotation around each call; ``until_ended``: that ends when the task was waited for, by the
    same thread."""

    def launched(step: int, task: Task) -> Launched:
        with TraceAnnotation(str(task), step=step):
            return launch(step, task)

    def launched_and_waited_for(step: int, task: Task) -> Launched:
        annotation = TraceAnnotation(str(task), step=step)
        annotation.__enter__()
        try:
            begun_s, wait = launch(step, task)
        except BaseException:
            annotation.__exit__(None, None, None)
            raise

        def waited_for() -> None:
            try:
                wait()
            finally:
                annotation.__exit__(None, None, None)

        return Launched(begun_s, waited_for)

    return launched_and_waited_for if until_ended else launched

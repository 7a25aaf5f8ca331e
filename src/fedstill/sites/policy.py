"""A real site's policy: the rules by which the site, not the server, decides which requests it answers."""

import tomllib
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from fedstill import methods, models, schema
from fedstill.engines.client_evaluation import steps_of
from fedstill.engines.run_spec import RunSpec
from fedstill.protocol import Method
from fedstill.settings import Settings


class SitePolicy(Settings):
    """A site's policy: a TOML file with these settings. A request that it does not allow is refused."""

    client: NonNegativeInt
    """The site's number in every run, from 0; the server's list of sites says who has which."""
    data: Path
    """The site's records: a folder of images or of parquet files, or an .npz file. No server ever names it."""
    state: Path
    """A folder of the site's own for its ledger, its log and what runs keep between steps."""
    methods: tuple[str, ...]
    """Steps that the site answers: "METHOD" for all steps of a method, "METHOD.STEP" for one."""
    budget: PositiveFloat | None = None
    """The largest epsilon, of each unit, of all releases of all runs together; None releases nothing."""
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5
    """Delta at which that epsilon is stated, and the largest delta for which a run may calibrate its noise."""
    unprotected: bool = False
    """Whether fields that no mechanism protects (models, images) may leave; the log lists them."""
    min_records: PositiveInt = 50
    """Smallest number of records with which the site answers."""
    public: dict[str, Path] = {}
    """Places of public data sets here, by the names that runs use; made-up ones (noise) need no entry."""
    simulated_noise: bool = False
    """Whether the server may choose the seed of the noise. It can subtract such noise: for tests only."""
    own_code: bool = False
    """Whether a run may name methods and models of packages installed here, beside those of fedstill."""
    device: str = "cpu"
    """Device on which steps compute."""
    threads: Annotated[int, Ge(1), Le(256)] = 1
    """Number of threads that a step may use."""

    @classmethod
    def read(cls, path: Path) -> "SitePolicy":
        """Read the file; relative paths in it start at its folder.

        Raises:
            ValueError: it can't be read or a setting is wrong, in one sentence.
        """
        try:
            policy = cls(**tomllib.loads(path.read_text()))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"the policy {str(path)!r} can't be read as TOML: {error}") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"the policy {str(path)!r} is wrong at '{where}': {first['msg']}") from error
        here = path.resolve().parent
        return policy.model_copy(
            update={
                "data": here / policy.data.expanduser(),
                "state": here / policy.state.expanduser(),
                "public": {name: here / place.expanduser() for name, place in policy.public.items()},
            }
        )

    @property
    def ledger(self) -> Path:
        """Folder of the site's ledger, which `create_ledger` makes once."""
        return self.state / "ledger"

    def check_run(self, spec: RunSpec, step: object) -> None:
        """Refuse a step of a run that the policy does not allow, before any code of the method is imported.

        Raises:
            Refused: the policy does not allow it.
        """
        if not {spec.name, f"{spec.name}.{step}"} & set(self.methods):
            allowed = ", ".join(self.methods) or "nothing"
            raise schema.Refused(f"its policy answers {allowed}, not '{schema.clean(f'{spec.name}.{step}')}' (methods)")
        if not self.own_code:
            if spec.name not in methods.TABLE:
                raise schema.Refused("its policy runs fedstill's own methods only (own_code)")
            if any(models.is_own(name) for name in (spec.model, *spec.models)):
                raise schema.Refused("its policy builds fedstill's own models only (own_code)")
        if spec.simulated_noise and not self.simulated_noise:
            raise schema.Refused(
                "the run wants privacy noise from a seed that the server knows (simulated_noise); use --noise entropy"
            )
        if spec.delta > self.delta:
            raise schema.Refused(f"the run's delta is {spec.delta:g}; its policy allows {self.delta:g} at most (delta)")

    def check_fields(self, method: Method, step: str) -> None:
        """Refuse a step whose reply would have fields that the policy does not let out.

        Raises:
            Refused: the method has no such step, or the policy does not allow a field.
        """
        steps = steps_of(method)
        if step not in steps:
            raise schema.Refused(f"step '{schema.clean(step)}' is not one of {', '.join(sorted(steps))}")
        fields = steps[step].reply.schema
        if any(f.is_released for f in fields) and self.budget is None and not self.unprotected:
            raise schema.Refused("its policy has no budget, so it releases nothing (budget)")
        bare = [f.name for f in fields if not (f.is_public or f.is_released)]
        if bare and not self.unprotected:
            raise schema.Refused(f"its policy lets nothing out unprotected, and '{bare[0]}' would be (unprotected)")

"""Settings spelt right and wrong, for ``make lint``: mypy refuses a comment below whose line is right.

Nothing runs this file; `warn_unused_ignores`, which is part of mypy's `strict`, makes it a test.
"""

import fedstill

fedstill.run("fedgm", data="digits", ipc=1, local={})
fedstill.run("fedavg", mean=0.3, local={"lr": 0.1}, partition="classes:1")
fedstill.run("fedavg", clinets=4)  # type: ignore[call-arg]
fedstill.run("fedavg", local={"lrr": 0.1})  # type: ignore[arg-type]
fedstill.compare(["fedavg"], out="x", limmit=3)  # type: ignore[call-arg]
fedstill.plan(epsilonn=(1.0,))  # type: ignore[call-arg]
fedstill.audit("fedavg-p", epsilon="1")  # type: ignore[arg-type]
fedstill.attack("runs/first", shadow=4)  # type: ignore[call-arg]
fedstill.run(fedstill.FedAvg(roundss=3))  # type: ignore[call-arg]

"""``fedstill methods``, ``data``, ``privacy`` and ``attack``."""

from pathlib import Path

from fedstill.cli.common import Bad, asks_help, line_of, print_found, print_json, terminal, usage


def list_methods(words: list[str]) -> None:
    """``fedstill methods``."""
    from fedstill import methods
    from fedstill.cli import catalogue, flags, parser

    if words and words[0] in methods.TABLE:
        raise Bad(f"'{words[0]}' is an unexpected argument; its settings: fedstill run {words[0]} --help")
    about = "List the methods: how often clients are asked, what they need and protect, and the paper."
    (form,) = parser.parse("fedstill methods", about, words, [parser.Section(flags.Format())])
    if form.json_:
        print_json({"methods": [catalogue.facts(name) for name in methods.TABLE]})
        return
    print(catalogue.listing())
    print(
        "\nprotects: the unit of the privacy guarantee with default settings"
        "\nsettings: fedstill run METHOD --help"
        "\ndifferences from the paper: docs/methods/METHOD.md"
    )


def data(words: list[str]) -> None:
    """``fedstill data``."""
    from fedstill.cli import flags, parser
    from fedstill.cli.declared import read

    text = (
        "usage: fedstill data list [--json]      list the known data sets\n"
        "       fedstill data show NAME [flags]  plot the records of each client\n"
    )
    if not words or asks_help(words[:1]):
        usage(words, text + parser.flags_text("fedstill data show NAME", flags.show_sections()))
    elif words[0] == "list":
        known, local_copy = read("fedstill.data.names:KNOWN"), read("fedstill.data.places:local_copy")
        (form,) = parser.parse(
            "fedstill data list", "List the known data sets.", words[1:], [parser.Section(flags.Format())]
        )
        hubs = {name: f"hub: {facts.hub}" if facts.hub else "scikit-learn" for name, facts in known.items()}
        sources = {name: str(local_copy(name) or hub) for name, hub in hubs.items()}
        if form.json_:
            print_json({"data_sets": [{"name": name, "source": source} for name, source in sources.items()]})
        else:
            width = max(map(len, sources))
            print("\n".join(f"{name:<{width}}  {source}" for name, source in {"name": "source", **sources}.items()))
    elif words[0] == "show":
        experiment, output = flags.parse_show("fedstill data show", words[1:])
        from fedstill.report import partition

        if output.json_:
            print_json(partition.numbers(experiment, output.out))
        else:
            terminal().print(*partition.show(experiment, output.out), sep="\n")
    else:
        raise Bad(f"there is no 'data {words[0]}'; choose list or show")


def privacy(words: list[str]) -> None:
    """``fedstill privacy``."""
    from fedstill.cli import flags, parser
    from fedstill.cli.declared import read

    text = (
        "usage: fedstill privacy RUN [--json]  show the clients' releases and their costs\n"
        "       fedstill privacy plan [flags]  plan noise and accuracy of a release\n"
        "       fedstill privacy import FILE   add up an Opacus history (import --help)\n"
    )
    if not words or asks_help(words[:1]):
        plan_flags = [parser.Section(read("fedstill.report.plan:Plan")(), title="options of privacy plan")]
        usage(words, text + parser.flags_text("fedstill privacy", plan_flags))
    elif words[0] == "plan":
        if (shown := flags.shown("fedstill.report.plan:Plan", words)) is not None:
            flags.parse_settings("fedstill privacy plan", words[1:], shown)
        from fedstill.lookup import add_working_folder
        from fedstill.report.plan import Plan, plan

        add_working_folder()
        settings, form = flags.parse_settings("fedstill privacy plan", words[1:], Plan())
        print_found(plan(settings), as_json=form.json_)
    elif words[0] == "import":
        program, rest = "fedstill privacy import FILE", words[2:] if words[1:2] != ["--help"] else words[1:]
        if (shown := flags.shown("fedstill.sites.opacus:Import", rest)) is not None:
            flags.parse_settings(program, rest, shown)
        if not words[1:] or words[1].startswith("-"):
            raise Bad(f"the file comes first: {program.replace('FILE', 'accountant.pt')} --delta 1e-5")
        from fedstill.sites.opacus import Import

        history, form = flags.parse_settings(program, rest, Import())
        print_found(history.run(Path(words[1])), as_json=form.json_)
    else:
        run, *rest = words
        about = "Show each client's releases in a run and their costs."
        (form,) = parser.parse("fedstill privacy RUN", about, rest, [parser.Section(flags.Format())])
        from fedstill.report import privacy as ledger

        if form.json_:
            print_json(ledger.numbers(Path(run)))
        else:
            print_found(({}, ledger.show(Path(run))), as_json=False)


def attack(words: list[str]) -> None:
    """``fedstill attack``."""
    from fedstill import attacks
    from fedstill.cli import flags, parser
    from fedstill.cli.declared import read
    from fedstill.lookup import add_working_folder

    if not words or asks_help(words[:1]):
        usage(
            words,
            "usage: fedstill attack RUN [ATTACK] [flags]  infer training records from a run\n"
            "       fedstill attack --updates FOLDER ...  infer them from gradients of others\n\n"
            "RUN is the folder of a finished run; ATTACK is membership by default. FOLDER\n"
            "has .pt, .safetensors or .npz files; see fedstill attack --updates --help.\n"
            + parser.flags_text(
                "fedstill attack RUN",
                [
                    parser.Section(kind(), title=name, about=(kind.__doc__ or "").splitlines()[0])
                    for name, kind in ((name, read(place)) for name, place in attacks.ATTACKS.items())
                ],
            ),
        )
        return
    if words[0].partition("=")[0] == "--updates":
        _attack_saved([*words[0].split("=", 1), *words[1:]])
        return
    if words[0].startswith("-"):
        raise Bad(f"the run comes first: fedstill attack RUN {' '.join(words)}")
    add_working_folder()
    run, *rest = words
    name = rest.pop(0) if rest and not rest[0].startswith("-") else None
    program = "fedstill attack RUN" + (f" {name}" if name else "")
    if (shown := flags.shown(attacks.ATTACKS.get(name or "membership", ""), rest)) is not None:
        flags.parse_settings(program, rest, shown)
    settings, form = flags.parse_settings(program, rest, attacks.find(name or "membership")())
    progress = terminal(stderr=form.json_)
    print_found(settings.attack(Path(run), progress, line_of(["attack", *words])), as_json=form.json_)


def _attack_saved(words: list[str]) -> None:
    """``fedstill attack --updates FOLDER``."""
    from fedstill import attacks
    from fedstill.cli import flags
    from fedstill.lookup import add_working_folder

    program = "fedstill attack --updates FOLDER"
    folder = next(iter(words[1:]), "-")
    rest = words[1:] if folder in ("-h", "--help") else words[2:]
    if folder.startswith("-") and not asks_help(rest):
        raise Bad(f"--updates needs the folder of the files: {program} --model convnet --shape 1 28 28")
    if (shown := flags.shown(attacks.SAVED, rest)) is not None:
        flags.parse_settings(program, rest, shown)
    from fedstill.attacks.saved import SavedUpdates

    add_working_folder()
    settings, form = flags.parse_settings(program, rest, SavedUpdates())
    print_found(settings.attack(Path(folder), terminal(stderr=form.json_)), as_json=form.json_)

"""Task sources. `SOURCES` names those that come with asyncrl."""

SOURCES: dict[str, str] = {
    "datasets": "asyncrl.data.sources.hugging_face:DatasetSource",
    "generated": "asyncrl.data.sources.generated:GeneratedSource",
    "json_lines": "asyncrl.data.sources.json_lines:JsonLinesSource",
    "lookup": "asyncrl.data.sources.lookup:LookupSource",
    "mix": "asyncrl.data.mix:MixSource",
    "nemo_gym": "asyncrl.data.sources.nemo_gym:NemoGymSource",
    "reasoning_gym": "asyncrl.data.sources.reasoning_gym:ReasoningGymSource",
    "seeds": "asyncrl.data.sources.seeds:SeedSource",
    "verifiers": "asyncrl.data.sources.verifiers:VerifiersSource",
}
"""Name -> import path, so that a name costs nothing until it is used. A config gives a name or an import path of its
own. Called with the options, and with `seed` and `model` (`model.path`) where it has these parameters."""

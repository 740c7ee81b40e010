"""AutoRound: matrices packed as by GPTQ or AWQ.

    auto_round:auto_gptq      as GPTQ packs them; older folders have auto_round:gptq:exllamav2
    auto_round:gptqmodel      as gptq_v2, whose zero points are stored as they are; auto_round alone means the same
    auto_round:auto_awq       as AWQ packs them

Modules that were left as floats are named in the settings, each with 16 bits.
"""

from __future__ import annotations

from typing import Final

from quire.compute.models.config_file import ConfigFile
from quire.compute.quantized.awq import Awq
from quire.compute.quantized.gptq import Gptq
from quire.compute.quantized.matrix import Method, group_size, refusal

FAMILY: Final = "auto_round"
OF_GPTQ: Final = ("auto_gptq", "gptq")
OF_GPTQ_2: Final = ("gptqmodel", "")
OF_AWQ: Final = ("auto_awq", "awq")
SAME: Final = ("bits", "data_type", "group_size", "sym")


def read(config: ConfigFile) -> Method:
    """Read the settings of a folder."""
    layout = config.fields.get("packing_format") or config.fields.get("backend") or FAMILY
    family, packer = [*layout.split(":"), ""][:2] if isinstance(layout, str) else ("", "")
    if family != FAMILY or packer not in (*OF_GPTQ, *OF_GPTQ_2, *OF_AWQ):
        raise refusal(config, f"AutoRound in the layout {layout!r}")
    config.require("data_type", "int", None)
    bits, unconverted = config.size("bits", 4), _left_as_floats(config)
    if bits not in ((4,) if packer in OF_AWQ else (4, 8)):
        raise config.error("bits", "4" if packer in OF_AWQ else "4 or 8")
    name = f"AutoRound, {bits} bits"
    if packer in OF_AWQ:
        return Awq(group_size(config), unconverted, name)
    return Gptq(bits, group_size(config), True, packer in OF_GPTQ, unconverted, name)


def _left_as_floats(config: ConfigFile) -> tuple[str, ...]:
    """Return the modules that are not quantised; raises for modules that are quantised in another way than the rest."""
    modules, left = config.section("extra_config"), []
    for name in modules.fields:
        module = modules.section(name)
        if module.size("bits", config.size("bits", 4)) >= 16:
            left.append(name)
        elif any(module.is_set(field) and module.fields[field] != config.fields.get(field) for field in SAME):
            raise config.error("extra_config", "only modules that are not quantised, with 16 bits")
    return tuple(left)

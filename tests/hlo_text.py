"""Writes small scheduled HLO programs by hand, for tests of what reads them."""

MB = "f32[250000]{0}"
UP = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
DOWN = "source_target_pairs={{0,3},{1,0},{2,1},{3,2}}"

INNER = f"""
%matmul (a: f32[250000]) -> f32[250000] {{
  %a = {MB} parameter(0)
  ROOT %c = {MB} convolution(%a, %a), dim_labels=bf_io->bf
}}
"""


def program(*lines: str, others: str = "") -> str:
    """A scheduled module of eight partitions; %x is a parameter of one megabyte."""
    body = "\n".join(f"  {line}" for line in (f"%x = {MB} parameter(0)", *lines))
    return (
        "HloModule step, is_scheduled=true, num_partitions=8\n"
        f"{INNER}{others}\nENTRY %main (x: f32[250000]) -> f32[250000] {{\n{body}\n}}\n"
    )


def matmul(name: str, cycles: int) -> str:
    """A fusion around a matmul."""
    return (
        f"%{name} = {MB} fusion(%x), kind=kOutput, calls=%matmul, "
        f'metadata={{op_name="layer/{name}"}}, '
        f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    )


def vector(name: str, cycles: int, calls: str = "none", operands: str = "%x") -> str:
    """A fusion without a matmul."""
    return (
        f"%{name} = {MB} fusion({operands}), kind=kLoop, calls=%{calls}, "
        f'backend_config={{"estimated_cycles":"{cycles}"}}'
    )


def permute_start(name: str, pairs: str = UP) -> str:
    """Sends %x to a neighbour."""
    return (
        f"%{name} = ({MB}, {MB}, u32[], u32[]) collective-permute-start(%x), channel_id=1, {pairs}"
    )


def permute_done(name: str, start: str) -> str:
    """Waits for what was sent."""
    return f"%{name} = {MB} collective-permute-done(%{start})"

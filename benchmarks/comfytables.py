"""The table of the ComfyUI node pack: rows of results/comfyui.json as Markdown."""

from __future__ import annotations

from typing import Any

from rows import Row

METHODS = ("ERTACache", "EasyCache", "LazyCache", "fewer steps")


def comfyui_table(found: Any) -> str:
    """Every method with euler by budget, our method with other samplers, and what is equal."""
    if not found:
        return "Not measured yet."
    steps = found["steps"]
    budgets = sorted({row["computed"] for row in found["rows"]}, reverse=True)
    head = [f"{budget} of {steps} steps | network evaluations" for budget in budgets]
    lines = [
        f"`{found['model']}` in ComfyUI {found['comfyui']}, {found['prompts']} held-out prompts, "
        f"calibrated on {found['calibration_prompts']} others. PSNR in dB of the image to "
        "ComfyUI's own full run of the same sampler, prompt and seed; 95 % intervals in brackets.",
        "",
        f"| | sampler | {' | '.join(head)} |",
        "|---|---|" + "--:|--:|" * len(budgets),
        *(_line(found["rows"], "euler", method, budgets) for method in METHODS),
    ]
    others = dict.fromkeys(row["sampler"] for row in found["rows"] if row["sampler"] != "euler")
    lines += [_line(found["rows"], sampler, "ERTACache", budgets) for sampler in others]
    lines += ["", _sentences(found)]
    return "\n".join(lines)


def _line(rows: list[Row], sampler: str, method: str, budgets: list[int]) -> str:
    name = f"**{method}**" if method == "ERTACache" else method
    cells = []
    for budget in budgets:
        (row,) = [
            row
            for row in rows
            if (row["sampler"], row["method"], row["computed"]) == (sampler, method, budget)
        ]
        interval = f"({row['psnr_low']:.1f} to {row['psnr_high']:.1f})"
        cells += [f"{row['psnr_db']:.1f} {interval}", f"{row['calls']:g}"]
    return f"| {name} | {sampler} | {' | '.join(cells)} |"


def _sentences(found: Any) -> str:
    there = ", ".join(f"{row['psnr_db']:.1f} dB at {row['computed']}" for row in found["pipeline"])
    equal = ", ".join(row["sampler"] for row in found["all_steps"] if row["equal"])
    exchanged = min(row["lowest_db"] for row in found["exchange"])
    prompts = found["exchange"][0]["prompts"]
    return (
        f"The pipeline of diffusers, calibrated on the same prompts, reaches {there} computed "
        f"steps. With all steps computed the latent is bit-equal to ComfyUI's own: {equal}. A "
        "policy calibrated in ComfyUI and used in diffusers, or the reverse, gives the same image: "
        f"at least {exchanged:.0f} dB between the two on {prompts} prompts, half of the steps "
        "computed."
    )

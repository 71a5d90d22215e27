"""What products reach in loops on cards with the same chip at another limit of power.

For developers; configs/devices have the rates (sustained). Needs no package.

    python3 tests/golden/fit_power_limits.py

An H100 SXM runs large products in bf16 at 730 TFLOP/s at 700 W (fit_sustained_products.py) and at 605 at
500 W (fit_early_products.py): rates go with that power of the limit which these two tell. Cards whose
loops end at the limit, too, and of which no loops over many shapes are published, are taken to follow it:
H100 PCIe and NVL from the H100, RTX 6000 Ada from the L40S. An H100 PCIe's best square product checks it.
"""

import math

EXPONENT = math.log(730 / 605) / math.log(700 / 500)
# Card: the card with the same chip, its TFLOP/s and W; the own limit; the best that was measured.
CARDS = {
    "H100 PCIe": ("H100 SXM", 730, 700, 350, 496),
    "H100 NVL": ("H100 SXM", 730, 700, 400, None),
    "RTX 6000 Ada": ("L40S", 200, 350, 300, None),
    "RTX 6000 Ada, fp8": ("L40S", 362, 350, 300, None),
}


def main() -> None:
    print(f"rates go with the power of {EXPONENT:.3f} of the limit")
    for card, (other, rate, its, limit, best) in CARDS.items():
        check = f"; its best square product reaches {best}" if best else ""
        reached = rate * (limit / its) ** EXPONENT
        print(f"{card}: {reached:.0f} TFLOP/s at {limit} W, as {rate} of an {other} at {its} W{check}")


if __name__ == "__main__":
    main()

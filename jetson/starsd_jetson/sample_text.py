"""Plain text for measuring a model on the spot: one part to set scales by, another to judge the result by."""

from __future__ import annotations

__all__ = ["CALIBRATION", "HELD_OUT"]

CALIBRATION = """\
User: Can you explain how a bicycle stays upright when nobody is holding it?
Assistant: A moving bicycle steers itself into a fall. When the frame leans to the left, the front wheel
turns to the left as well, and the wheels roll back underneath the rider. Two things make that happen: the
axis of the fork points a little ahead of where the tyre touches the road, and the spinning wheel adds a
small push of its own. At walking pace the effect is weak, which is why beginners wobble until they pedal
faster.

User: Write a Python function that returns the n-th Fibonacci number.
Assistant: Here is a short version that uses a loop instead of recursion:

```python
def fibonacci(n: int) -> int:
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a

print([fibonacci(i) for i in range(10)])  # [0, 1, 1, 2, 3, 5, 8, 13, 21, 34]
```

It needs n additions and keeps only two numbers in memory.

Recipe: Tomato soup for four people
1. Heat 2 tablespoons of olive oil in a large pot and cook one chopped onion for 5 minutes.
2. Add 3 cloves of garlic, 800 g of tinned tomatoes, 500 ml of vegetable stock and a pinch of sugar.
3. Simmer for 20 minutes, blend until smooth, and season with salt, pepper and fresh basil.

The committee met on Tuesday, 14 March 2017, in Room 205. Mrs. Alvarez asked whether the bridge would be
finished before the winter; the engineer answered that 62% of the steel was on site, and that the rest,
worth $1.3 million, was due in May. Several members doubted it. "We've heard that before," one of them said,
"and we waited two years."
"""

HELD_OUT = """\
The lighthouse stood on a narrow rock, half a mile from the shore, and in bad weather the keepers were cut
off for weeks at a time. They kept a diary. On most days there was little to write: the direction of the
wind, the number of ships that passed, how much oil the lamp had burned. But in the winter of 1862 the
entries grew longer, because a storm had broken the boat and the supplies were running low. One of the men
wrote about his daughter, who was learning to read, and promised himself that he would teach her the names
of the stars when he came home.

Question: What is the difference between weather and climate?
Answer: Weather is what happens in the air at a certain place on a certain day: rain, wind, sunshine, a
temperature of 21 degrees. Climate is the pattern of weather over many years. A single cold week says
nothing about the climate, just as one unusually tall person says nothing about the average height of a
country. Scientists usually look at periods of thirty years or more before they speak of a change.

To install the program, open a terminal and type the following commands. The first one creates a separate
environment, so that nothing on your system is changed:

    python3 -m venv tools
    source tools/bin/activate
    pip install --upgrade pip

If you see an error message that says "permission denied", check that you own the folder and try again.
Finally, remember these three rules: make a copy of your data before you begin, read each message carefully,
and never run a command that you do not understand.
"""

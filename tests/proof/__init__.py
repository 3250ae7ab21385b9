"""The proof: every composition of parallelism that ingot accepts trains the model that one process trains.

cases.py      the cases: every form alone, every legal pair, triples, compositions of four axes; generated
reference.py  one process in float64: plain PyTorch around the undivided model
ranks.py      forked gloo ranks that live for many cases
play.py       one case on one rank, by the code that trains: train/parts.py and train/step.py
compare.py    the combined results of the ranks against the reference
faults.py     errors planted one at a time, each of which must turn checks red; faults_long.py: for long sequences and
              experts; planting.py: the way to plant them
__main__.py   all cases, and the table in docs/parallelism.md: make proof
"""

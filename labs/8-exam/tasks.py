"""Lab 8, the debugging exam: which cases of the failure gallery are drawn, is in
cases.toml.
"""

from pathlib import Path

from lab_parts.exam import Exam

TASKS = ("cure",)
LESSONS = {}
QUESTIONS = {"rank": "a number", "cause": "a name of the gallery"}
exam = Exam(Path(__file__).with_name("cases.toml"))

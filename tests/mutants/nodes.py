"""Mutants of jobs on several nodes."""

from .mutant import Mutant

_NODES = "tests/unit/trainer/launch/test_nodes.py"
_LINK = "tests/unit/trainer/launch/test_link.py"

MUTANTS: list[Mutant] = [
    Mutant(
        name="any-node-may-join",
        what="the leader does not look at a node's proof of the key",
        file="trainer/launch/link.py",
        before='if not hmac.compare_digest(proof, _proof(key, "node", ours, theirs)):',
        after="if not proof:",
        tests=(f"{_LINK}::test_a_node_with_another_key_does_not_get_in",),
    ),
    Mutant(
        name="any-leader-is-believed",
        what="a node does not look at the leader's proof of the key",
        file="trainer/launch/link.py",
        before='if not hmac.compare_digest(_line(connected), _proof(key, "leader", ours, theirs)):',
        after="if not _line(connected):",
        tests=(f"{_LINK}::test_a_leader_that_does_not_know_the_key_is_not_believed",),
    ),
    Mutant(
        name="key-for-everybody",
        what="every user of the machine can read the key of a run",
        file="trainer/launch/link.py",
        before="os.O_TRUNC, 0o600)",
        after="os.O_TRUNC, 0o644)",
        tests=(f"{_LINK}::test_the_key_is_for_the_user_only_and_a_file_that_is_none_leads_nowhere",),
    ),
    Mutant(
        name="rest-of-a-message-lost",
        what="what the other end does not take at once is not sent",
        file="trainer/launch/link.py",
        before="del self._unsent[:sent]",
        after="self._unsent.clear()",
        tests=(f"{_LINK}::test_messages_come_whole_and_in_order_however_large",),
    ),
    Mutant(
        name="signs-of-life-from-the-main-loop-only",
        what="a launcher that waits for its fork server gives no sign of life",
        file="trainer/launch/link.py",
        before="        while not ends.wait(seconds / 2):",
        after="        while ends.wait(seconds / 2):",
        tests=(f"{_LINK}::test_signs_of_life_come_while_the_sender_waits_for_something_else",),
    ),
    Mutant(
        name="silent-node-kept",
        what="a node without a sign of life stays a part of the job",
        file="trainer/launch/nodes.py",
        before="elif node.link.silent() > self._launch.node_seconds:",
        after="elif node.link.silent() > 600:",
        tests=(f"{_NODES}::test_a_silent_node_is_lost",),
    ),
    Mutant(
        name="other-versions-join",
        what="a node with another version of torch takes part",
        file="trainer/launch/node_messages.py",
        before="        if theirs.get(name) != value:",
        after="        if name not in theirs:",
        tests=(f"{_NODES}::test_a_node_with_another_version_is_refused_and_the_others_go_on",),
    ),
    Mutant(
        name="hang-of-one-node-is-a-hang",
        what="a job hangs as soon as the ranks of one node make no progress",
        file="trainer/launch/job_on_nodes.py",
        before="certain = all(hang and not hang.suspects for hang in found)",
        after="certain = any(hang and not hang.suspects for hang in found)",
        tests=(f"{_NODES}::test_a_hang_is_one_of_all_nodes_and_each_gives_its_evidence",),
    ),
    Mutant(
        name="stopped-rank-of-a-node-unseen",
        what="a stopped rank is no hang while another node makes progress",
        file="trainer/launch/job_on_nodes.py",
        before="if not certain and time.monotonic() < self._asked_at + latest.limit:",
        after="if not certain:",
        tests=(f"{_NODES}::test_a_stopped_rank_of_one_node_is_a_hang_whatever_the_others_do",),
    ),
    Mutant(
        name="signals-of-nodes-add-up",
        what="a Ctrl-C that every node gets counts as several, and ends the run without a save",
        file="trainer/launch/supervise.py",
        before="        if again or not self._interrupts.asked:\n",
        after="        if True:\n",
        tests=(f"{_NODES}::test_a_signal_to_every_node_is_one_request_to_stop",),
    ),
    Mutant(
        name="wait-for-nodes-not-stopped",
        what="a request to stop does not end the wait for nodes",
        file="trainer/launch/supervise.py",
        before="or (stopping.request and not running.started)",
        after="",
        tests=(f"{_NODES}::test_a_request_to_stop_ends_the_wait_for_nodes",),
    ),
    Mutant(
        name="error-for-the-leader-alone",
        what="other nodes look for another leader when the run has failed",
        file="trainer/launch/job_on_nodes.py",
        before="            running.part(None, error)\n",
        after="            running.part(None)\n",
        tests=(f"{_NODES}::test_the_error_of_a_rank_is_that_of_every_node",),
    ),
    Mutant(
        name="unread-exit-code-is-life",
        what="a launcher that has ended counts as alive until its parent reads its exit code",
        file="machine/processes.py",
        before='return _state(process) in ("", "Z", "X")',
        after='return _state(process) in ("",)',
        tests=("tests/unit/machine/test_machine.py::test_a_process_whose_exit_code_nobody_has_read_is_gone",),
    ),
]

"""The kinds of events in a run's `events.jsonl`, with the fields of each. Readers must skip unknown kinds.

Common fields: kind, time (Unix seconds), late (true: a full disk took the line only after others of later times). Steps
count from 1: step n is the n-th optimizer step.

  run_started    run, attempt, world_size, layout {axis: size; with expert parallelism also "ep": ranks, with context
                 parallelism also "context": "ring", "ulysses" or "usp, ulysses N"}, device, precision, parameters,
                 flops_per_token, peak_flops (null: unknown), versions {..}, hardware {..}, from_step (step of the
                 resumed checkpoint, or 0), config_sha256, data_fingerprint
  rank_started   rank, pid, host, attempt
  start_times    attempt, seconds {phase: seconds, null if not measured}, total_seconds (of all that were); phases:
                 detect, kill, wait (null: the first start), check (null: of no machines), schedule, import, groups,
                 build, load, warm_up
                 (resilience/start_times.py)                         one per attempt that wrote two log lines, or ended
  step           step, loss (nats per token), grad_norm, lr           one per optimizer step, written every log_every
  progress       step, steps, loss, bpb, grad_norm, lr, tokens, tokens_per_second, mfu (null on CPU), data_wait_seconds,
                 step_seconds, eta_seconds, cost_usd (null: price unknown), peak_memory_bytes, load_cv, max_load (null:
                 no experts), dropped, fallback (null: not applicable to this model), passed (number of steps whose
                 data were passed; if all were: loss, bpb, grad_norm, tokens_per_second, mfu, data_wait_seconds,
                 step_seconds and eta_seconds are null)               one per log line
  waits          step, steps (number covered), and for each use of a rank's time (data, pipeline, collectives, reading,
                 computing, queued, blocked) {mean, least, most, rank}: seconds per step over all ranks, and the rank
                 with the most (telemetry/usage.py); axes {axis: {exposed, hidden}}: the communication of each axis of
                 the mesh in the same form, hidden not on GPUs (mesh/axis_traffic.py)              one per log line
  straggler      step, rank, host, phase ("data" or "compute"), factor (of its peers' time), since (step), seconds
                 (more per step than they), ended (true: slow no more), slowdown (null; once the rank was slow for
                 launch.straggler_seconds: the factor by which steps are longer because of it)
                                                   when a rank becomes slow, changes, stays slow for long, or recovers
  data_trouble   rank, step, path, reason, tries, seconds             token shards that could not be read at first
  quarantined    step, shard, begin, end (the tokens of it that are left out from this step on), windows (that they
                 touch), code, found (in words), rank, host           damaged data with data.on_damage = "quarantine"
  listed         step, path (of a quarantine list), documents (of it in the tokens), windows (that have a token of them,
                 and are left out from this step on)                 one per list with documents that are new to the run
  experts        step, steps (number covered), layers [..]; by layer: load_cv, max_load, min_load, dropped and fallback
                 (null: not applicable to this model), entropy, loads [[..]] (null except at a checkpoint)
                 (telemetry/progress.py)                             one per log line
  sources        step, loss {source: nats per token}, share {source: share of the tokens}, since the line before
                                                                      one per log line, for two sources or more
  measured       step, values {name: number}, by the names of schema/metrics.py: what no other event has. One per log
                 line for the run, one per step in which layers were measured, one per check (guard.sanity_every) with
                 the flipped routes; with metrics.record
  metrics        step, by (name of a callback), values {name: number}  one per log line and callback that has any
  metrics_lost   rank, step (newest), rows (of this attempt that were dropped so far), reason, ended (true: the rest of
                 the attempt is not recorded)                        numbers that RUN/metrics lacks (schema/metrics.py)
  skipped        steps [..] (steps whose updates were vetoed)         one per log line that has any
  passed         steps [..] (steps whose data were passed)            one per log line that has any
  finding        step, found [kinds], loss, grad_norm, loss_sigmas, norm_sigmas, norm_factor, skipped
                 (trainer/guard/step_judge.py)                        one per step in which the guard found something
  retried        step, found [kinds] (in the first try), healthy (nothing was found in the second), same (both had the
                 same loss and gradient norm, bit for bit), ranks [..] (of the copies of the model whose own loss or
                 gradients had other bits; []: not known)             a step was computed again before its update
  sanity         step, loss (of a fixed batch of held-out text, nats per token), suspect
                                                                      before a full save, guard.sanity_every
  guard          action ("again", "pass", "earlier", "lower", "accept" or "stop"), first, last (the steps whose updates
                 were skipped), skipped (of them; 0: all), found [kinds], lr_factor, clip_factor, lr_last, lr
                 (schema/guard_record.py)                             the guard took a measure
  guard_replayed  first, last (the steps that were trained again), found [kinds] (the first time), verdict ("data": they
                 hurt again; "hardware": nothing was found)           after the measure "again"
  guard_asked    first, last, found [kinds], until (Unix seconds)     the run waits for a person (guard_answer.py)
  alert          alert (its kind), step, since (the first step that shows it), value, limit, places [ranks or layers],
                 cause ("": not known)                                what many steps show (trainer/guard/alerts.py)
  gradient_range step, loss_scale (null: none), layers [names]; by layer, as shares of the elements: underflow (0 or
                 subnormal in the training precision) and saturation (near its largest number)
                                                                      every guard.precision_every, in fp16 and bf16
  state_damaged  step, rank, host, tensor (its name in a checkpoint), element, bit (of it; null: unknown, or more
                 differ), sign ("own_hash": it changed between two updates; "minority": most copies are equal, and
                 others; "undecided": two copies differ, and both ranks have such an event; "recomputed": ranks computed
                 different gradients of the same tokens; "recomputed_alone": this one explains all differences)
                                                                      written by the rank; a rolled_back event follows
  state_replayed step (of the damage), ranks [..], named (true: all of them are damaged; false: one of them), verdict
                 ("transient", "persistent", or "other": other ranks were damaged)   the steps were trained again
  rolled_back    from_step, to_step, reason ("guard", or "damage"), why (this checkpoint, in words; "": unknown),
                 passed_over [{step, reason} ..] (newer ones)         training continues from the checkpoint of to_step
  checkpoint     step, bytes, stall_seconds (training paused), snapshot_seconds (of these, for the copy of the state
                 in memory; null: training waited for the files), write_seconds (until it was verified), verify_seconds
                 (the slowest rank read back and compared, most of it while it wrote), path, store (to which it is to
                 go, as in the run file; "": none)
                                                                      after the checkpoint was verified
  checkpoint_skipped  step, what ("full", or "weights" alone), in_flight (step)   an earlier save was being written
  checkpoint_failed   step, what, code (of an error of ingot, or ""), reason, write_seconds
                                                                      training went on without this checkpoint
  weights_saved  the fields of `checkpoint`                           after the weights alone were saved and verified
  checkpoint_interval  step, what, seconds, stall_seconds (null: none measured), nodes, failures_per_node_day, formula
                                                                      with "auto": the interval from here on
  checkpoint_refused  step, path, reason                              damaged; the next older checkpoint is tried
  checkpoint_stored   step, what, store, bytes (sent; 0: by an earlier attempt), seconds   the store has it
                      left_out: the steps of older checkpoints that newer ones overtook; absent if there are none
  checkpoint_not_stored  step, store, code, reason, fix, retry_seconds (until the next attempt; null: none)
  checkpoint_fetched  step, store, bytes (received), seconds          the local disk had none that is as new
                      step, node, files, bytes, whole_bytes, seconds  files on disks of nodes that this node lacked
  checkpoint_loaded   step, bytes (of the blocks that all ranks loaded from their disks, without what verification
                      reads), seconds (with verification, and with what was fetched meanwhile)
                                                                      the state was restored from it
  rewound             step, set_aside (steps), weights (steps), folder, reason   by ingot ckpt rewind
  lease_recorded      store, epoch                                    the missing record of this attempt was written
  lease_not_recorded  store, epoch, code, reason                      it refuses the record: nothing is uploaded
  record_damaged      file, reason, done                              a record of the run: what was done without it
  snapshot_pageable   step, rank, code (of cudaHostRegister)         the memory of a rank's snapshots is not page-locked
  snapshot_kept       step, nodes (that have each rank's snapshot in memory, at least), bytes, seconds, failures
  snapshot_restored   step, own_bytes (from memory of the same node), peer_bytes (of others), seconds
  evaluation     step, bpb, loss, tokens, by_source {name: {bpb, loss, tokens, unigram_bpb}}, unigram_bpb,
                 seconds, background (true: made while the run trained, by background_eval/; absent: by the ranks)
  sample         step, prompt, text, background (as above)
                 With background, events of later steps may precede these. A roll-back, and a start from an older step,
                 make those of later steps void.
  task_scores    step, scores {task: {metric: value}}, lower_is_better ["task/metric" ..], examples {task: number},
                 seconds, background                                  tasks of lm-eval
  background_evaluation  step, what ("full", or "weights" alone: the save), seconds, reason ("": all went well), void
                 (the run went back to a step before this save meanwhile), best (null, or {metric, value, pinned}: it is
                 the best checkpoint so far, and a pin for it follows unless a user has pinned it)
                                                                      an evaluation in the background has ended
  evaluation_sized  step, tokens (of held-out text that each evaluation in the background scores from now on), share,
                 max_tokens, every, heldout (the settings that it follows from), budget_seconds, start_seconds,
                 seconds_per_token (null: not measured), reason
                                                                      before the first one, and with other settings
  evaluation_skipped  step, what (as above), code, reason             a save that is due and cannot be evaluated
  best_checkpoint  step, metric, value, pinned (false: a user had pinned it), unpinned [steps] (best ones before it),
                 reason (why it could not be pinned; "": all went well)
                                                                      the pins of evaluate.background.keep_best are set
  fault          rank, failure ("crash", "killed", "hang", "bug", "memory", "data", "disk", "numerics", "settings",
                 "node" or "job"), cause, code (of the error; "": none), step (whose numbers ended it, of "numerics";
                 else last seen), detected_by ("supervisor", "watchdog"), evidence (path in the run folder; "": none),
                 seconds (since a rank last made progress; null: the rank ended), limit (how long that may take [s]),
                 limit_reason (the setting, or the time that it was learned from)
                                                                      a rank was lost, or an error ended the attempt
  node           action ("leads", "steps_down", "joined", "lost" or "drained"), host, pid, started (of its launcher, in
                 Unix seconds; older logs have it of one that leads or joined alone), node (its number in the job;
                 null: none yet), reason (of a loss, or why the leader steps down), address, leader_address (of one
                 that joined: the two ends of its connection, whose network the ranks use; the loopback address on the
                 leader's machine)                                    a machine of a job on several. The
                 loss of a leader, and its fault, are written by the next one
  spares         wanted (launch.spares), waiting                     fewer machines than that wait as spares, for
                                                                      launch.shrink_seconds, or as many again
  health         node, device, report (its kind), code (of an XID, or 0), count, words, verdict ("warn"; "drain": the
                 run saves and goes on without the machine; "discard": it saves nothing before)   (machine/health)
  fleet_check    seconds, fleet [{node, rates {check: per second}, wrong {check: number of wrong results},
                 clock (seconds ahead)} ..], links [{first, second, round, rate} ..], unfit [{node, check, words,
                 slow (not wrong)} ..]
                                                                      machines were checked (trainer/fleet/rounds.py)
  restart        attempt, of (in launch.restart_window_seconds), wait_seconds, kept (how many ranks keep their
                 processes), step, signature, adapted (of the failure, for the next leader)
                                                                      the supervisor starts the job again
  planned_restart  reason, step (that was saved), kept (as above)     the same, although nothing had failed
  layout         nodes, of_nodes, ranks, overrides [KEY=VALUE ..] (settings that differ from the run file; []: none),
                 reason ("nodes": some are missing; "memory": a rank ran out of it; "": as in the run file again)
                                                                      the job changes its layout
  drill          action ("kill"), rank, pid, step                     a fault injected on purpose
  stopped        step, reason ("requested", "launch.stop_after", "restart", "drain" or the name of a signal), saved_step
                 (of the newest checkpoint)                           stopped on request; later steps are lost
  finished       step, tokens, seconds
  setting_changed  key, old, new, step                                the user accepted it; valid for steps after `step`
  sink_failed    sink (its name), reason ("raised", "hung", "ended" or "refused"), words, left_out (calls)
                                                                      the first trouble of a sink in a start of the run
  sink_closed    sink, sent, left_out (calls), starts (of its process), finished (it has seen all and closed)
                                                                      the run ends, and the sink had trouble
  exported       path, max_logit_difference
  stage          name, seconds, summary                               a stage of quickstart
"""

from collections.abc import Mapping
from typing import Any

RUN_STARTED = "run_started"
RANK_STARTED = "rank_started"
START_TIMES = "start_times"
STEP = "step"
PROGRESS = "progress"
WAITS = "waits"
STRAGGLER = "straggler"
DATA_TROUBLE = "data_trouble"
QUARANTINED = "quarantined"
LISTED = "listed"
EXPERTS = "experts"
SOURCES = "sources"
MEASURED = "measured"
METRICS = "metrics"
METRICS_LOST = "metrics_lost"
SKIPPED = "skipped"
PASSED = "passed"
FINDING = "finding"
RETRIED = "retried"
GUARD = "guard"
GUARD_REPLAYED = "guard_replayed"
GUARD_ASKED = "guard_asked"
SANITY = "sanity"
ALERT = "alert"
GRADIENT_RANGE = "gradient_range"
STATE_DAMAGED = "state_damaged"
STATE_REPLAYED = "state_replayed"
ROLLED_BACK = "rolled_back"
CHECKPOINT = "checkpoint"
WEIGHTS_SAVED = "weights_saved"
CHECKPOINT_INTERVAL = "checkpoint_interval"
CHECKPOINT_SKIPPED = "checkpoint_skipped"
CHECKPOINT_FAILED = "checkpoint_failed"
CHECKPOINT_REFUSED = "checkpoint_refused"
CHECKPOINT_STORED = "checkpoint_stored"
CHECKPOINT_NOT_STORED = "checkpoint_not_stored"
CHECKPOINT_FETCHED = "checkpoint_fetched"
CHECKPOINT_LOADED = "checkpoint_loaded"
REWOUND = "rewound"
LEASE_RECORDED = "lease_recorded"
LEASE_NOT_RECORDED = "lease_not_recorded"
RECORD_DAMAGED = "record_damaged"
SNAPSHOT_PAGEABLE = "snapshot_pageable"
SNAPSHOT_KEPT = "snapshot_kept"
SNAPSHOT_RESTORED = "snapshot_restored"
EVALUATION = "evaluation"
SAMPLE = "sample"
TASK_SCORES = "task_scores"
BACKGROUND_EVALUATION = "background_evaluation"
EVALUATION_SIZED = "evaluation_sized"
EVALUATION_SKIPPED = "evaluation_skipped"
BEST_CHECKPOINT = "best_checkpoint"
FAULT = "fault"
NODE = "node"
SPARES = "spares"
HEALTH = "health"
FLEET_CHECK = "fleet_check"
RESTART = "restart"
PLANNED_RESTART = "planned_restart"
LAYOUT = "layout"
DRILL = "drill"
STOPPED = "stopped"
FINISHED = "finished"
SETTING_CHANGED = "setting_changed"
SINK_FAILED = "sink_failed"
SINK_CLOSED = "sink_closed"
EXPORTED = "exported"
STAGE = "stage"

PLANNED_STOPS = ("restart", "drain")  # reasons of stops after which the supervisor starts the job again


def ends_run(kind: str | None, facts: Mapping[str, Any]) -> bool:
    """Return whether an event is the end of the run: it has finished, or stopped and is not started again. facts: the
    fields of the event."""
    return kind == FINISHED or (kind == STOPPED and facts.get("reason") not in PLANNED_STOPS)


def launcher_of(event: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the identity of the launcher that a `node` event is about, as far as one log needs it: its process id and
    start. A process id alone is used again, and a host may get another name; older logs lack the start, and have both.
    """
    names = ("pid", "started") if isinstance(event.get("started"), int | float) else ("host", "pid")
    return tuple(str(event.get(name)) for name in names)

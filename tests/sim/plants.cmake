# Bugs that the exploration has to find. Each is a replacement of one text in one of the library's
# files; a copy with it takes the file's place in an explorer of its own, and the test succeeds when
# a seed fails and says why in the words expected. More arguments are the explorer's.

function(penstock_plant name file expected seeds old new)
  penstock_plant_copy(copy ${name} ${file} "${old}" "${new}")
  if(NOT copy)
    add_test(NAME sim/finds_${name} COMMAND ${CMAKE_COMMAND} -E false)
    return()
  endif()
  set_source_files_properties(${copy} PROPERTIES COMPILE_OPTIONS "-fsanitize=thread;-w")
  penstock_explorer_program(sim_plant_${name} ${copy})
  add_test(NAME sim/finds_${name}
           COMMAND sim_plant_${name} --seeds ${seeds} --expect "${expected}" ${ARGN})
  set_tests_properties(sim/finds_${name} PROPERTIES TIMEOUT 120)
endfunction()

# ---- launched once, ended once ---------------------------------------------------------------
penstock_plant(two_owners sched/pump.c "" 5000
  "if (pst__lane_try_own(lane))"
  "int busy = (int)pst__load_relaxed(&lane->owned); pst__store_relaxed(&lane->owned, 1); if (!busy)")
penstock_plant(gate_opened_twice sched/launch.c "" 5000
  "} while (!pst__cas_acq_rel(&gate->word, &seen, open));"
  "} while (pst__load_relaxed(&gate->word) != seen); pst__store_release(&gate->word, open);")
penstock_plant(no_callback_of_canceled sched/advance.c "" 5000
  "if (node->detail != NULL && node->detail->done != NULL) {"
  "if (node->detail != NULL && node->detail->done != NULL && end->state != PST__TASK_CANCELED) {")
penstock_plant(canceled_while_in_flight sched/serve.c "" 5000
  "is_in_flight(node) ? PST_PENDING" "stop >= 0 && is_in_flight(node) ? PST_PENDING")
penstock_plant(block_too_early sched/growing.c "" 5000
  "task->references = references;" "task->references = 1;")

# ---- in order --------------------------------------------------------------------------------
penstock_plant(release_at_start sched/serve.c "" 5000
  "    lane->current = node;"
  "    lane->current = node; pst__advance_release(advance, node, PST__ALL, PST_OK);")
penstock_plant(head_not_asked sched/serve.c "before its predecessor" 5000
  "pst__node *node = pst__lane_head(queue);" "pst__node *node = pst__lane_first(queue);")
penstock_plant(no_wait_between_lanes sched/serve.c "before its predecessor" 5000
  "if (!pst__is_early(from, lane)) continue;" "continue;")
penstock_plant(no_wait_of_grown_task sched/graph.c "before its predecessor" 5000
  "if (source == NULL || !source->detail.event_recorded ||" "if (1 ||")
penstock_plant(wait_for_the_launch_alone sched/wait.c "" 20000
  "asked.launched_suffices =\n        by_stream &&" "asked.launched_suffices = by_stream ||")

penstock_plant(events_outside_ignored sched/serve.c "outside of its graph" 5000
  "for (uint32_t i = 0; i < detail->after_count; i++) {" "for (uint32_t i = 0; i < 0; i++) {")

penstock_plant(launches_interleave sched/launch.c "" 20000
  "if (graph->is_ordered) {" "if (0) {")
penstock_plant(added_between_a_launchs_pushes sched/growing.c "" 40000
  "    await_launch(graph->runtime);\n" "" --program launchers)

# ---- every run drains ------------------------------------------------------------------------
penstock_plant(lost_edge sched/growing.c "" 5000
  "return pst__grown_push(is_early ? &source->early : &source->late, link);"
  "pst__link **list = is_early ? &source->early : &source->late;
    pst__link *head = pst__load_acquire(list);
    if (head == &pst__grown_closed) return 0;
    link->next = head;
    pst__store_release(list, link);
    return 1;")
penstock_plant(no_wake_of_arrivals sched/advance.c "" 40000
  "pst__arrivals_push(&lane->arrivals, node);\n        pst__lane_notify(lane);"
  "pst__arrivals_push(&lane->arrivals, node);")
penstock_plant(no_look_before_sleep sched/worker.c "" 5000
  "look seen = serve(self);\n        if (seen.changed ||"
  "look seen = {0, 0};\n        if (seen.changed ||")

penstock_plant(added_to_a_stopped_graph sched/growing.c "does not end" 20000
  "    pst__runtime_note_stop(graph->runtime);\n    pst__lane_notify(lane);" "")
penstock_plant(launched_while_canceled sched/launch.c "" 80000
  "if (pst__load_relaxed(&graph->stop) != PST_OK) pst__runtime_note_stop(runtime);" ""
  --program launchers)
penstock_plant(arrived_after_the_look sched/turn.c "" 20000
  "        pst__arrivals_move(&leader->arrivals, &leader->ready);" "        (void)0;"
  --program launchers)
penstock_plant(stopped_behind_a_task_that_runs sched/turn.c "does not end" 20000
  "pst__lane_first(lane) != NULL)" "pst__lane_first(lane) != NULL && lane->current == NULL)")

penstock_plant(loop_not_signalled sched/lane.c "" 5000
  "if (descriptor >= 0) make_readable(descriptor);" "")
penstock_plant(loop_not_polled sched/pump.c "" 5000
  "if (changed || poll == 0) return PST__POLL_FIRST_NS;" "if (!changed) return 0;")
penstock_plant(blind_watchdog sched/watchdog.c "" 5000
  "return ++stall->looks > LOOKS;" "return 0;")
penstock_plant(never_abandoned sched/serve.c "" 5000
  "return pst__load_acquire(&runtime->poison) != PST_OK && runtime->grace_ns != 0 &&"
  "return 0 &&")

# ---- nothing leaks ---------------------------------------------------------------------------
penstock_plant(links_not_freed sched/graph.c "was not freed" 5000
  "    pst__grown_free_links(graph, task);\n    ck_stack_push" "    ck_stack_push")
penstock_plant(half_made_lane sched/place.c "was not freed" 5000
  "            pst__lane_free(lane);\n        } else {" "            (void)lane;\n        } else {")
penstock_plant(traced_name_freed_as_more ops/zero/registry.c "was freed as" 20000
  "pst__heap_free(engine->carrier.heap, text, bytes);"
  "pst__heap_free(engine->carrier.heap, text, bytes + 64);")
penstock_plant(open_bucket_forgotten ops/zero/pass.c "was not freed" 20000
  "if (status != PST_OK) pst__reduce_abandon(engine);" "")
penstock_plant(refused_operation_forgotten ops/transfer/submit.c "was not freed" 20000
  "        pst__operation_give(operation->carrier, operation);\n        return status;"
  "        return status;")

penstock_plant(gradient_never_consumed ops/deepcompile/flat_reduce.c "consumed" 20000
  "        pst__sources_drop(&flat->held, flat->reports[i].token);\n    flat->report_count"
  "        (void)flat->reports[i].token;\n    flat->report_count")

# ---- the same order on all ranks -------------------------------------------------------------
penstock_plant(ticket_skipped_on_a_rank ops/transfer/submit.c "different collectives" 5000
  "    operation->queue->tickets++;"
  "    operation->queue->tickets += operation->carrier->rank == 1 ? 2 : 1;")

penstock_plant(step_ticket_skipped_on_a_rank ops/transfer/submit.c "different collectives" 5000
  "    if (status == PST_OK) operation->queue->tickets++;"
  "    if (status == PST_OK) operation->queue->tickets += operation->carrier->rank == 1 ? 2 : 1;")

# ---- a pass that leaves its program ----------------------------------------------------------
penstock_plant(last_step_stays_closed ops/transfer/program.c "has not come in" 20000
  "    for (; program->next < program->count; program->next++)"
  "    for (; program->next + 1 < program->count; program->next++)")

# ---- leases do not overlap -------------------------------------------------------------------
penstock_plant(pieces_overlap mem/pool.c "overlaps" 5000
  "    right->offset = offset;\n" "    right->offset = offset - PST_ARENA_ALIGNMENT;\n")

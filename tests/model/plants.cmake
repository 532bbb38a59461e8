# Bugs that a program has to find. Each is a replacement of one text in one of the library's files; a
# copy with it takes the file's place, and the test succeeds when the program named fails.
function(penstock_model_plant name file program old new)
  penstock_plant_copy(copy ${name} ${file} "${old}" "${new}")
  if(NOT copy)
    add_test(NAME model/finds_${name} COMMAND ${CMAKE_COMMAND} -E false)
    return()
  endif()
  set_source_files_properties(${copy} PROPERTIES COMPILE_OPTIONS -w)
  penstock_model_program(model_plant_${name} planted.c ${copy})
  add_test(NAME model/finds_${name} COMMAND model_plant_${name} ${program})
  set_tests_properties(model/finds_${name} PROPERTIES TIMEOUT 120)
endfunction()

# ---- launches --------------------------------------------------------------------------------
penstock_model_plant(launch_over_unlaunched sched/launch.c launch_over_launch
  "return pst__load_acquire(&latest->open) >> 32 == 0 &&" "(void)latest; return")
penstock_model_plant(launches_interleaved sched/launch.c two_launchers
  "if (graph->is_ordered) {" "if (0) {")
penstock_model_plant(end_counted_after_callback sched/advance.c launch_in_callback
  "pst__share_is_last(&share->unlaunched, share))\n        count_open(run, PST__RUN_UNLAUNCHED);"
  "pst__share_is_last(&share->unlaunched, share) && 0)\n        (void)0;")
penstock_model_plant(left_before_its_end sched/advance.c destroy_after_wait
  "    pst__node_become(node, end->number, end->state, end->status);\n    pst__advance_release(advance, node"
  "    if (end->is_last)
        (void)pst__sub_acq_rel(&pst__graph_run(node->graph, end->number)->unleft, 1);
    ((pst__end *)(uintptr_t)end)->is_last = 0;
    pst__node_become(node, end->number, end->state, end->status);\n    pst__advance_release(advance, node")
penstock_model_plant(launch_after_poison sched/launch.c poison_and_launch
  "    pst_status poison = pst_runtime_status(runtime);\n    if (poison != PST_OK) return poison;\n" "")
penstock_model_plant(poisoned_graph_restarted sched/growing.c poison_and_add
  "if (poison == PST_OK) forget_cancel(graph, run);" "poison = PST_OK; forget_cancel(graph, run);")
penstock_model_plant(gate_misses_poison sched/growing.c poison_and_add_gate
  "if (status != PST_OK) pst__graph_cancel(graph, status);" "")

penstock_model_plant(hook_misses_poison sched/poison.c hook_and_poison
  "if (status == PST_OK && poison != PST_OK) pst__hooks_call(runtime, poison);" "")
penstock_model_plant(hook_still_runs sched/poison.c hook_removed
  "while (pst__load_acquire(&found->is_running))" "while (0)")

# ---- gates -----------------------------------------------------------------------------------
penstock_model_plant(gate_touched_after_its_end sched/launch.c growing_gate_and_destroy
  "    opened(gate, status);\n    return status;"
  "    opened(gate, status);\n    gate->detail->event_recorded = 0;\n    return status;")

# ---- asynchronous devices --------------------------------------------------------------------
penstock_model_plant(no_wait_for_flight sched/serve.c flight_behind_flight
  "if (!pst__is_early(from, lane)) continue;" "continue;")
penstock_model_plant(no_wait_for_grown_flight sched/graph.c late_edge_behind_flight
  "if (source == NULL || !source->detail.event_recorded ||" "if (1 ||")
penstock_model_plant(launched_before_its_event sched/serve.c flight_behind_flight
  "    pst_status status = PST_OK;\n    if (node->flags & PST__NODE_EVENT)\n        status ="
  "    pst_status status = PST_OK;\n    pst__advance_release(advance, node, PST__WHEN_LAUNCHED, status);
    if (node->flags & PST__NODE_EVENT)\n        status =")
penstock_model_plant(late_event_not_recorded sched/wait.c late_wait
  "if (in_flight && !detail->event_recorded) {" "if (0) {")
penstock_model_plant(launched_in_flight sched/serve.c flight_over_flight
  "return pst__word_state(node->word) == PST__TASK_LAUNCHED;" "return 0;")
penstock_model_plant(flights_not_asked sched/serve.c flight_over_flight
  "lane->device->ops->event_query(lane->device, event_in_flight(lane, node));" "PST_OK;")

# ---- foreign loops ---------------------------------------------------------------------------
penstock_model_plant(stale_poll sched/pump.c loop_and_helper
  "&seen, next) && pending);" "&seen, next));")

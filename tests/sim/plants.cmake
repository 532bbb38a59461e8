# Bugs that the exploration has to find. Each is a replacement of one text in one of the library's
# files; a copy with it takes the file's place in an explorer of its own, and the test succeeds when
# a seed fails and says why in the words expected. (The tree's own files hold no planted bug.)

function(penstock_plant name file expected seeds old new)
  set(original ${PROJECT_SOURCE_DIR}/${file})
  set(copy ${CMAKE_CURRENT_BINARY_DIR}/plants/${name}.c)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${original})
  file(READ ${original} text)
  string(REPLACE "${old}" "${new}" planted "${text}")
  if(planted STREQUAL text)
    message(WARNING "The bug ${name} finds no soil: ${file} has no '${old}' any more. "
                    "Change tests/sim/plants.cmake with it.")
    add_test(NAME sim/finds_${name} COMMAND ${CMAKE_COMMAND} -E false)
    return()
  endif()
  file(CONFIGURE OUTPUT ${copy} CONTENT "${planted}" @ONLY)
  set_source_files_properties(${copy} PROPERTIES COMPILE_OPTIONS "-fsanitize=thread;-w")
  penstock_explorer_program(sim_plant_${name} ${copy})
  add_test(NAME sim/finds_${name}
           COMMAND sim_plant_${name} --seeds ${seeds} --expect "${expected}")
  set_tests_properties(sim/finds_${name} PROPERTIES TIMEOUT 120)
endfunction()

# ---- launched once, ended once ---------------------------------------------------------------
penstock_plant(two_owners sched/pump.c "" 5000
  "if (!pst__lane_try_own(lane)) {"
  "int busy = (int)pst__load_relaxed(&lane->owned); pst__store_relaxed(&lane->owned, 1); if (busy) {")
penstock_plant(gate_opened_twice sched/launch.c "" 5000
  "} while (!pst__cas_acq_rel(&gate->word, &seen, open));"
  "} while (pst__load_relaxed(&gate->word) != seen); pst__store_release(&gate->word, open);")
penstock_plant(no_callback_of_canceled sched/advance.c "and has ended" 5000
  "if (node->detail != NULL && node->detail->done != NULL)"
  "if (node->detail != NULL && node->detail->done != NULL && state != PST__TASK_CANCELED)")
penstock_plant(canceled_while_in_flight sched/turn.c "" 5000
  "is_in_flight(node) ? PST_PENDING" "stop >= 0 && is_in_flight(node) ? PST_PENDING")
penstock_plant(block_too_early sched/growing.c "" 5000
  "task->references = references;" "task->references = 1;")

# ---- in order --------------------------------------------------------------------------------
penstock_plant(release_at_start sched/turn.c "" 5000
  "    lane->current = node;"
  "    lane->current = node; pst__advance_release(advance, node, PST__ALL, PST_OK);")
penstock_plant(head_not_asked sched/turn.c "before its predecessor" 5000
  "return lane->order == PST_LANE_BY_READINESS || pst__node_is_ready(node) ? node : NULL;"
  "return node;")
penstock_plant(no_wait_between_lanes sched/turn.c "before its predecessor" 5000
  "if (!pst__is_early(from, lane)) continue;" "continue;")
penstock_plant(no_wait_of_grown_task sched/growing.c "before its predecessor" 5000
  "if (source == NULL || !source->detail.event_recorded ||" "if (1 ||")
penstock_plant(wait_for_the_launch_alone sched/wait.c "" 20000
  "asked.launched_suffices =\n        by_stream &&" "asked.launched_suffices = by_stream ||")

# ---- every run drains ------------------------------------------------------------------------
penstock_plant(lost_edge sched/growing.c "" 5000
  "} while (!pst__cas_acq_rel(list, &head, link));"
  "} while (pst__load_relaxed(list) != head); pst__store_release(list, link);")
penstock_plant(no_wake_of_arrivals sched/advance.c "" 40000
  "pst__arrivals_push(&lane->arrivals, node);\n        pst__lane_notify(lane);"
  "pst__arrivals_push(&lane->arrivals, node);")
penstock_plant(no_look_before_sleep sched/worker.c "" 5000
  "look seen = serve(self);\n        if (seen.changed ||"
  "look seen = {0, 0};\n        if (seen.changed ||")

# ---- nothing leaks ---------------------------------------------------------------------------
penstock_plant(links_not_freed sched/growing.c "was not freed" 5000
  "    free_links(graph, task);\n    ck_stack_push" "    ck_stack_push")
penstock_plant(half_made_lane sched/lane.c "was not freed" 5000
  "        pst__lane_destroy(lane);\n        return status;" "        return status;")
penstock_plant(wait_name_not_written ops/registry.c "was freed as" 20000
  "    (void)snprintf(wait_name, bytes, \"wait %s\", name);\n" "")
penstock_plant(open_bucket_forgotten ops/pass.c "was not freed" 20000
  "if (status != PST_OK) pst__reduce_abandon(engine);" "")

# ---- the same order on all ranks -------------------------------------------------------------
penstock_plant(ticket_skipped_on_a_rank ops/operation.c "different collectives" 5000
  "if (status == PST_OK) operation->queue->tickets++;"
  "if (status == PST_OK) operation->queue->tickets += operation->engine->rank == 1 ? 2 : 1;")

# ---- leases do not overlap -------------------------------------------------------------------
penstock_plant(pieces_overlap mem/pool.c "overlaps" 5000
  "    right->offset = offset;\n" "    right->offset = offset - PST_ARENA_ALIGNMENT;\n")

# A copy of one of the library's files in which one text is replaced: a bug that a test must find.
# Sets <copy> to its path, or to "" after a warning when the file has no such text any more. (The
# tree's own files hold no planted bug.)
function(penstock_plant_copy copy name file old new)
  set(original ${PROJECT_SOURCE_DIR}/${file})
  set(planted_file ${CMAKE_CURRENT_BINARY_DIR}/plants/${name}.c)
  set(${copy} "" PARENT_SCOPE)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${original})
  file(READ ${original} text)
  string(REPLACE "${old}" "${new}" planted "${text}")
  if(planted STREQUAL text)
    message(WARNING "The bug ${name} finds no soil: ${file} has no '${old}' any more. "
                    "Change the plants of ${CMAKE_CURRENT_SOURCE_DIR} with it.")
    return()
  endif()
  file(CONFIGURE OUTPUT ${planted_file} CONTENT "${planted}" @ONLY)
  set(${copy} ${planted_file} PARENT_SCOPE)
endfunction()

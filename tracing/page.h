/* What the library itself writes to the page of a rank, and asks of another rank's. */
#ifndef PST_TRACING_PAGE_H
#define PST_TRACING_PAGE_H

#include <penstock/page.h>

/* Others find the page from here on, under this job; NULL is fine. */
void pst__page_show(pst_page *page, const char *job, int rank, int world_size);
/* They do not any more. NULL is fine. */
void pst__page_hide(pst_page *page);

/* What is wrong with the process of a page of this machine ("is stopped", "has ended"); NULL:
 * nothing is known to be. */
const char *pst__page_fault(const pst_page *page);

/* One thread at a time, each of them. */
void pst__page_post(pst_page *page, const pst_page_engine *engine);
void pst__page_post_lanes(pst_page *page, const pst_page_lane *lanes, size_t count);

#endif

// Package audit writes down who decided what, why, and how it ended.
//
// It owns the shape of an entry, its redaction, and the windows in which equal refusals are counted instead of repeated. It believes the person that a
// request was verified for, and otherwise the service that decides; it believes no clock but the database's. It never decides, never drops a decision
// that changed state, and never writes a secret: values are hidden by their type, their field and their look.
//
// An entry is the event `audit.recorded`, appended in the transaction of its decision: both are there or neither is. A refusal has no transaction of its
// own, since nothing was changed; Log writes the first of a kind at once, counts the next ones, and writes a summary a window while they go on and one
// entry when what was refused goes through. Counts that were not written yet die with the process; entries never do. Who is refused whatever is named
// has a bound of kinds (RefuseBounded): what is beyond it is counted in one entry, so that nobody floods the log and nothing is left out in silence.
//
// The order and the hash chain of entries are made by readmodel.
package audit

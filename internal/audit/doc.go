// Package audit records who decided what, why, and how it ended.
//
// It owns the shape of an entry, its redaction, and the windows in which equal refusals are counted instead of
// repeated. It takes the actor from the verified identity of the request, and otherwise from the service that decides;
// it takes the time from the database's clock alone. It never decides, never drops a decision that changed state, and
// never writes a secret: values are hidden by their type, by the name of their field, and by what they look like.
//
// An entry is the event `audit.recorded`, appended in the transaction of its decision: both are there or neither is. A
// refusal has no transaction of its own, since nothing was changed; Log writes the first of a kind at once, counts the
// next ones, and writes one summary per window while they go on and one entry when the same request is accepted. Counts
// that were not written yet are lost with the process; entries never are. An occurrence is counted at most once: a
// count whose commit was not answered, so that it may have been written or not, is not written again. An actor whose
// every request is refused has a bound of kinds (RefuseBounded): refusals beyond it are counted in one entry, so that
// such an actor cannot flood the log and no refusal goes unrecorded.
//
// The service readmodel makes the order and the hash chain of entries.
package audit

// Package task owns what an agent does with tasks from the moment they are offered until their results are
// acknowledged.
//
// It believes an envelope that a key of its verifier set has signed, for this node, inside its window by server time,
// and the ledger's record of epochs and of tasks that ran before. It never believes the offer around the envelope, and
// never decides what a task means: handlers do.
//
//	Offer ─► verify ─► ledger (one fsync for all that wait) ─► Delivered ─► Started ─► handler ─► ledger ─► Result ─► Ack
//	           └─► refused: evidence, and a failed result that is not stored in the ledger
//
// Guarantees: nothing is acknowledged as delivered before it is on disk; a handler runs at most once for one (task_id,
// attempt) unless its type is idempotent; tasks of one workspace run in the order of (epoch, op_seq), equal ones in
// parallel, and a task that a later one has overtaken ends as superseded; after a restart nothing is taken up before
// the control plane has listed what may run on the node, a task that had started is then observed, not run again, and a
// cancel does not end the observation at once; a result is sent, and sent again with each session, until it is
// acknowledged; a handler's panic is a failed result; no output is larger than a frame may carry or has text that a
// database cannot store.
package task

// Package ledger owns the agent's memory of tasks: what was delivered, started, finished and acknowledged, and which numbers of a workspace were
// seen.
//
// It believes only what its file holds. It never runs a task, never talks to anyone, and never overwrites a file that it cannot read: a corrupt
// ledger is an error, or by an option is set aside under another name. The new one has another id, by which the control plane knows that what was
// started is forgotten, and asks what became of it instead of starting it twice.
// A ledger belongs to one node: opened for another it is kept under another name, and a new one begins.
//
// Guarantees: what Deliver, Start and Finish answered is on disk before they return; one (task_id, attempt) is stored once, and asking again
// answers what is stored; a task of a lower epoch, or of a lower op_seq than one already started, never starts; a result is kept until the later
// of its acknowledgement and a day after the task's expiry.
//
//	Deliver ─► delivered ─► Start ─► started ─► Finish ─► finished ─► Ack ─► acked ─► Prune
//	                           └─► superseded (nothing changes; the caller finishes it so)
//
// Writes of many goroutines share commits: while one transaction is being synced the next gathers, and starts the moment the former ends.
//
// A commit is one record at the end of a journal beside the file, and one sync. The file's tables get what the journal has when that is full (256 KiB),
// when the ledger is opened, and when it is closed. A record that a kill cut off was never reported; one that cannot be read with whole ones behind it is
// corruption. While a ledger is open its format is another, so that a build without journals refuses what a kill has left.
package ledger

// Package ledger owns the agent's durable record of tasks: which were delivered, started, finished and acknowledged,
// and which epochs and op_seqs of a workspace were seen.
//
// It believes only its file. It never runs a task, never uses the network, and never overwrites a file that it cannot
// read: a corrupt ledger is an error, or by an option is set aside under another name. The new one has another id, by
// which the control plane recognises that the record of started tasks is lost, and asks what became of them instead of
// starting them twice. A ledger belongs to one node: opened for another it is kept under another name, and a new one
// begins.
//
// Guarantees: what Deliver, Start and Finish report is on disk before they return; one (task_id, attempt) is stored
// once, and a repeated call returns the stored entry; a task of a lower epoch, or of a lower op_seq than one already
// started, never starts; a result is kept until the later of its acknowledgement and a day after the task's expiry.
//
//	Deliver ─► delivered ─► Start ─► started ─► Finish ─► finished ─► Ack ─► acked ─► Prune
//	                           └─► superseded (nothing changes; the caller finishes it so)
//
// Writes of many goroutines share commits: while one transaction is being synced the next gathers, and starts the
// moment the former ends.
//
// A commit is one record at the end of a journal beside the file, and one sync. The changes in the journal are put into
// the file's tables when the journal is full (256 KiB), when the ledger is opened, and when it is closed. A record that
// a kill cut off was never reported; one that cannot be read with whole ones behind it is corruption. While a ledger is
// open its file has another format, so that a build without journals refuses a file that a kill has left.
package ledger

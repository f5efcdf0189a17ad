// Package collect keeps the evidence about nodes.
//
// A consumer of events keeps it in rows that change when what was seen changes, and makes the node due to be judged.
// What is older than what is kept, by the version of its source's row, is ignored.
//
// What a host reports comes with the events of its sessions, or by a person who brings the record of a host that
// reaches no API (MergeHost). It counts for a day at most, never as of a time in the future, and only until a session
// is admitted: what was seen before that is over. A failure that was not seen again when it would have been tried again
// is over too. Codes that name no reason explain why an agent is not heard: their text stands beside that verdict.
//
// Rows of nodes are locked before any evidence about them is written, in the order of their ids.
package collect

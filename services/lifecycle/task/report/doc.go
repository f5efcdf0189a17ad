// Package report applies what agents report of their tasks, and compares the tasks that an agent has at the begin of a
// session with the rows. Every report names the task and its attempt.
//
// It applies reports only under the gate of the node that they come from. Delivered is not running, and only an agent's
// result makes succeeded or failed. A result that comes after the end is kept as late evidence and changes nothing. An
// attempt above the row's is adopted only by the signed envelope that proves it. It offers no task.
package report

// Package ask asks agents for the records of their hosts where verdicts are better explained by them.
//
// The judge writes a request in the transaction of its verdict (Want), for reasons of the catalogue that ask the host.
// An Asker of each replica of recovery has lifecycle queue `diagnostics.collect` for those of nodes that are connected
// and whose gate is open, and keeps what the agents return as evidence of their hosts, which is unproven. Its
// guarantees:
//   - an agent is asked at most once for each verdict: the key of the task is the verdict's;
//   - over all replicas at most 16 tasks are asked for at a time, and about 256 nodes wait: judges that write requests
//     at the same time may exceed that together;
//   - while no verdict asks there is no row;
//   - a replica that dies leaves its requests to the others;
//   - a request goes with the end of its task, five minutes after the first answer that had a task which has not ended,
//     with the node's active state, and in any case after an hour. While lifecycle does not answer it waits.
package ask

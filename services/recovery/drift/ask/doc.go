// Package ask asks agents for the records of their hosts where verdicts are better explained by them.
//
// The judge writes a request in the transaction of its verdict (Want), for reasons of the catalogue that ask the host.
// An Asker of each replica of recovery has lifecycle queue `diagnostics.collect` for those of connected nodes, and
// keeps what the agents return as evidence of their hosts, which is unproven. Its guarantees:
//   - an agent is asked at most once for each verdict: the key of the task is the verdict's;
//   - over all replicas at most 16 tasks are under way, and at most 256 nodes wait;
//   - while no verdict asks there is no row;
//   - a replica that dies leaves its requests to the others, and a request that is not answered is given up.
package ask

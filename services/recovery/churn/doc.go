// Package churn keeps the budgets of recreations. A recreation takes one token of its workspace's bucket and one of its
// placement's. A workspace's bucket has churn.recreates_per_hour tokens and refills at that rate. A placement's bucket
// is large enough for as many of its instances as may fail together without engaging the brake, a fifth by default and
// at least one, to use up the tokens of their workspaces.
//
// A round of the watchdog reads the buckets of the open records once, takes tokens in memory, and writes once what has
// changed.
package churn

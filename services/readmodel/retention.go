package readmodel

import (
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/retention"
)

// terms are the kinds of rows of readmodel that have a term, ordered so that rows that depend on another are cut before
// it.
var terms = []retention.Table{
	{Name: "tasks", Key: policy.RetentionTimelineSeconds, Table: "task", ID: "task_id"},
	{Name: "runs", Key: policy.RetentionTimelineSeconds, Table: "run", ID: "run_id"},
	{Name: "claims", Key: policy.RetentionTimelineSeconds, Table: "claim", ID: "claim_id"},
	{Name: "allocations", Key: policy.RetentionTimelineSeconds, Table: "allocation", ID: "allocation_id"},
	{Name: "instances", Key: policy.RetentionTimelineSeconds, Table: "instance", ID: "instance_id"},
	{Name: "findings", Key: policy.RetentionFindingsSeconds, Table: "finding", ID: "finding_id"},
	{Name: "workspaces", Key: policy.RetentionTimelineSeconds, Table: "workspace", ID: "workspace_id"},
	{Name: "nodes", Key: policy.RetentionTimelineSeconds, Table: "node", ID: "node_id"},
	{Name: "verdicts", Key: policy.RetentionTimelineSeconds},
	{Name: "verdict_periods", Key: policy.RetentionRecoveriesSeconds, Table: "verdict_period", ID: "period_id"},
	{Name: "recoveries", Key: policy.RetentionRecoveriesSeconds, Table: "recovery_record", ID: "record_id"},
	{Name: "incidents", Key: policy.RetentionRecoveriesSeconds, Table: "incident", ID: "incident_id"},
	{Name: "impacts", Key: policy.RetentionRecoveriesSeconds, Table: "impact", ID: "impact_id"},
	{Name: "audit", Key: policy.RetentionAuditSeconds},
	{Name: "events", Key: policy.RetentionEventsSeconds, Schema: "events"},
}

var (
	cutBatch = pg.DefineDynamic(pg.RoleReadmodel, "readmodel.cut_batch",
		func(t retention.Table) string { return t.Call("readmodel") }, terms...)
	oldestLeft = pg.DefineDynamic(pg.RoleReadmodel, "readmodel.oldest_left",
		func(t retention.Table) string { return t.Oldest("readmodel") }, terms...)

	// cuts are the retention rules of readmodel.
	cuts = retention.Of(terms, cutBatch.For, oldestLeft.For)
)

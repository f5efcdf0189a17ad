package recovery

import (
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/retention"
)

// terms are the kinds of rows of recovery that have a retention term, in an order in which rows that refer to a row are
// deleted before it.
var terms = []retention.Table{
	{Name: "enrollments", Key: policy.RetentionCredentialsSeconds, Table: "enrollment", ID: "enrollment_id"},
	{Name: "tokens", Key: policy.RetentionCredentialsSeconds, Table: "token", ID: "token_id"},
	{
		Name: "recovery_tokens", Key: policy.RetentionCredentialsSeconds, Table: "recovery_token", ID: "token_id",
	},
	{Name: "serials", Key: policy.RetentionCredentialsSeconds},
	{Name: "instances", Key: policy.RetentionIdentitiesSeconds, Table: "instance", ID: "instance_id"},
	{Name: "identities", Key: policy.RetentionIdentitiesSeconds, Table: "identity", ID: "node_id"},
	{Name: "epochs", Key: policy.RetentionIdentitiesSeconds, Table: "workspace_epoch", ID: "workspace_id"},
	{Name: "records", Key: policy.RetentionRecoveriesSeconds, Table: "recovery_record", ID: "record_id"},
	{Name: "verdict_periods", Key: policy.RetentionRecoveriesSeconds, Table: "verdict_period", ID: "period_id"},
	{Name: "issuance_stops", Key: policy.RetentionRecoveriesSeconds, Table: "issuance_stop", ID: "stop_id"},
	{
		Name: "token_extensions", Key: policy.RetentionRecoveriesSeconds, Table: "token_extension", ID: "extension_id",
	},
	{
		Name: "recovery_actions", Key: policy.RetentionRecoveriesSeconds, Table: "recovery_action", ID: "action_id",
	},
	{Name: "profiles", Key: policy.RetentionRecoveriesSeconds, Table: "profile", ID: "profile_id"},
	{Name: "incidents", Key: policy.RetentionRecoveriesSeconds, Table: "incident", ID: "incident_id"},
}

var (
	cutBatch = pg.DefineDynamic(pg.RoleRecovery, "recovery.cut_batch",
		func(t retention.Table) string { return t.Call("recovery") }, terms...)
	oldestLeft = pg.DefineDynamic(pg.RoleRecovery, "recovery.oldest_left",
		func(t retention.Table) string { return t.Oldest("recovery") }, terms...)

	// cuts are the deletions of recovery's expired rows.
	cuts = retention.Of(terms, cutBatch.For, oldestLeft.For)
)

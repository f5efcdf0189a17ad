package fault

import (
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// Alert is how an open incident of a kind is brought to people.
type Alert struct {
	Severity commonv1.Severity // where it follows that of verdicts, the highest that it can have
	Pages    bool              // it is paged whatever the severity
	Audience string            // who is to act, as a label of metrics
}

// AlertOf returns how incidents of a kind are brought to people. P0 is paged, and so is one cause that many nodes have
// in common. An unknown kind has no severity, and the audience operator.
func AlertOf(kind commonv1.IncidentKind) Alert {
	severity := incidentSeverities[kind]
	owner := ExplainIncident(kind).Owner
	if owner == "" {
		owner = ownerOperator
	}
	return Alert{
		Severity: severity, Audience: strings.ReplaceAll(owner, " ", "_"),
		Pages: severity == commonv1.Severity_SEVERITY_P0 || kind == commonv1.IncidentKind_INCIDENT_KIND_FLEET_DRIFT,
	}
}

// incidentSeverities are never written after the process starts.
var incidentSeverities = map[commonv1.IncidentKind]commonv1.Severity{
	commonv1.IncidentKind_INCIDENT_KIND_STEP_CLASS:             commonv1.Severity_SEVERITY_P1,
	commonv1.IncidentKind_INCIDENT_KIND_FLEET_BRAKE:            commonv1.Severity_SEVERITY_P0,
	commonv1.IncidentKind_INCIDENT_KIND_CHURN_BUDGET:           commonv1.Severity_SEVERITY_P1,
	commonv1.IncidentKind_INCIDENT_KIND_MACHINE_UNREACHABLE:    commonv1.Severity_SEVERITY_P1,
	commonv1.IncidentKind_INCIDENT_KIND_CONTROL_PLANE_ROLLBACK: commonv1.Severity_SEVERITY_P0,
	commonv1.IncidentKind_INCIDENT_KIND_SIGNING_KEYS:           commonv1.Severity_SEVERITY_P0,
	commonv1.IncidentKind_INCIDENT_KIND_STORAGE:                commonv1.Severity_SEVERITY_P1,
	commonv1.IncidentKind_INCIDENT_KIND_ISSUER_UNTRUSTED:       commonv1.Severity_SEVERITY_P0,
	commonv1.IncidentKind_INCIDENT_KIND_FLEET_DRIFT:            commonv1.Severity_SEVERITY_P0,
	commonv1.IncidentKind_INCIDENT_KIND_IDENTITY_SUSPECTED:     commonv1.Severity_SEVERITY_P0,
	commonv1.IncidentKind_INCIDENT_KIND_STATE_OVERDUE:          commonv1.Severity_SEVERITY_P1,
}

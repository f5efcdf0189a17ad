package nodes

import (
	"fmt"
	"strings"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// healthColumns returns whether a node is healthy and by what, its contract part by part, and what was counted of it.
func healthColumns() []output.Column[*readmodelv1.Node] {
	return []output.Column[*readmodelv1.Node]{
		{Title: "healthy", Of: healthyText},
		{Title: "healthy: checklist", Of: checklistText},
		contractColumn("process", commonv1.DriftPart_DRIFT_PART_PROCESS, processText),
		contractColumn("endpoint", commonv1.DriftPart_DRIFT_PART_ENDPOINT, endpointText),
		contractColumn("certificate", commonv1.DriftPart_DRIFT_PART_CERTIFICATE, certificateText),
		contractColumn("authority", commonv1.DriftPart_DRIFT_PART_AUTHORITY,
			func(_ *output.Printer, n *readmodelv1.Node) string {
				return itemText(n, recoveryv1.HealthCheck_HEALTH_CHECK_ISSUER_TRUSTED)
			}),
		contractColumn("tasks", commonv1.DriftPart_DRIFT_PART_TASKS, tasksText),
		contractColumn("host", commonv1.DriftPart_DRIFT_PART_HOST, hostPartText),
		{Title: "counters", Of: countersText},
	}
}

// healthyText returns whether a node is proven healthy, or which items are missing.
func healthyText(pr *output.Printer, n *readmodelv1.Node) string {
	v := n.GetVerdict()
	switch {
	case v.GetHealthySince() != nil:
		return "yes, since " + pr.When(v.GetHealthySince())
	case n.GetReason() != "":
		return "no: " + n.GetReason()
	case n.GetVerdictStaleSince() != nil:
		return "not known: recovery has judged nothing since " + pr.When(n.GetVerdictStaleSince())
	case len(v.GetChecklist()) == 0:
		return "not proven: nothing was wrong with it so far, so it was never probed"
	}
	var missing []string
	for _, item := range v.GetChecklist() {
		if !item.GetPresent() {
			missing = append(missing, human.Enum(item.GetCheck()))
		}
	}
	return "no: missing " + strings.Join(missing, ", ")
}

func checklistText(pr *output.Printer, n *readmodelv1.Node) string {
	return strings.Join(kit.TextsOf(n.GetVerdict().GetChecklist(), func(item *recoveryv1.HealthItem) string {
		if !item.GetPresent() {
			return human.Enum(item.GetCheck()) + ": missing, " + item.GetDetail()
		}
		return human.Enum(item.GetCheck()) + ": " + pr.When(item.GetObservedAt()) + ", " + item.GetDetail()
	}), "\n")
}

// itemText returns the detail of an item of the checklist.
func itemText(n *readmodelv1.Node, check recoveryv1.HealthCheck) string {
	for _, item := range n.GetVerdict().GetChecklist() {
		if item.GetCheck() == check {
			return item.GetDetail()
		}
	}
	return ""
}

// contractColumn returns what is known of one part of a node: what is wrong with it by the evidence of its verdict,
// otherwise the given text.
func contractColumn(title string, part commonv1.DriftPart, text func(*output.Printer, *readmodelv1.Node) string,
) output.Column[*readmodelv1.Node] {
	return output.Column[*readmodelv1.Node]{
		Title: "contract: " + title, Of: func(pr *output.Printer, n *readmodelv1.Node) string {
			for _, e := range n.GetVerdict().GetEvidence() {
				if e.GetPart() == part && e.GetReason() != 0 {
					return strings.TrimSpace(human.Enum(e.GetReason()) + ", by " + human.Enum(e.GetSource()) + " " +
						pr.When(e.GetObservedAt()) + " " + e.GetDetail())
				}
			}
			return text(pr, n)
		},
	}
}

func processText(pr *output.Printer, n *readmodelv1.Node) string {
	if !n.GetConnected() {
		return human.OnlyIf(n.GetSince() != nil, "not connected since "+pr.When(n.GetSince()))
	}
	return "connected since " + pr.When(n.GetSince()) + ", agent " + n.GetSession().GetAgentVersion()
}

func endpointText(_ *output.Printer, n *readmodelv1.Node) string {
	profile := n.GetSession().GetProfile()
	if profile == nil {
		return ""
	}
	var texts []string
	for _, each := range [][2]string{
		{"api", profile.GetApiHost()},
		{"recovery", profile.GetRecoveryHost()},
		{"terminal", profile.GetTerminalHost()},
		{"profile", profile.GetFingerprint()},
	} {
		if each[1] != "" {
			texts = append(texts, each[0]+" "+each[1])
		}
	}
	return strings.Join(texts, ", ")
}

func certificateText(pr *output.Printer, n *readmodelv1.Node) string {
	id, session := n.GetIdentity(), n.GetSession()
	if id.GetCurrentSerial() == "" {
		return ""
	}
	text := "serial " + id.GetCurrentSerial() + ", expires " + pr.When(id.GetCertificateNotAfter())
	return text + human.OnlyIf(n.GetConnected() && session.GetSerial() != id.GetCurrentSerial(),
		"; the session is on "+session.GetSerial())
}

func tasksText(_ *output.Printer, n *readmodelv1.Node) string {
	texts := []string{human.OnlyIf(n.GetGate() != nil, "gate "+nodeWork(nil, n))}
	for _, check := range []recoveryv1.HealthCheck{
		recoveryv1.HealthCheck_HEALTH_CHECK_PROBE_COMPLETED,
		recoveryv1.HealthCheck_HEALTH_CHECK_NO_EXPIRED_TASK_CURRENT,
	} {
		if text := itemText(n, check); text != "" {
			texts = append(texts, text)
		}
	}
	return strings.Trim(strings.Join(texts, "; "), "; ")
}

func hostPartText(_ *output.Printer, n *readmodelv1.Node) string {
	host := n.GetSession().GetHost()
	if host == nil {
		host = n.GetGate().GetHost()
	}
	if disk := host.GetStateDisk(); disk != nil && !disk.GetFull() {
		return "its directories have room"
	}
	return ""
}

// generations is where the numbers of an era begin: a session's generation counts the sessions below it.
const generations = 1<<40 - 1

func countersText(_ *output.Printer, n *readmodelv1.Node) string {
	id := n.GetIdentity()
	if id == nil {
		return ""
	}
	text := fmt.Sprintf("%d sessions asked for since it enrolled, %d mints, %d refused registers",
		id.GetIssued()&generations, id.GetMints(), id.GetRefusedRegisters())
	return text + human.OnlyIf(id.GetLastRefusal() != 0, ", the last one "+human.Enum(id.GetLastRefusal()))
}

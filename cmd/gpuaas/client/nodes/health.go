package nodes

import (
	"fmt"
	"slices"
	"strings"
	"time"

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

// checklistOf returns the items of a node as recovery has them now, or as its last verdict had them.
func checklistOf(n *readmodelv1.Node) []*recoveryv1.HealthItem {
	if health := n.GetHealth(); health != nil {
		return health.GetChecklist()
	}
	return n.GetVerdict().GetChecklist()
}

// healthyText returns whether a node is proven healthy, or which items are missing and what brings them.
func healthyText(pr *output.Printer, n *readmodelv1.Node) string {
	items := checklistOf(n)
	var missing []string
	for _, item := range items {
		if !item.GetPresent() {
			missing = append(missing, human.Enum(item.GetCheck()))
		}
	}
	switch since := n.GetVerdict().GetHealthySince(); {
	case since != nil && len(missing) == 0:
		return "yes, since " + pr.When(since)
	case n.GetReason() != "":
		return "no: " + n.GetReason()
	case n.GetVerdictStaleSince() != nil:
		return "not known: recovery has not judged it since " + pr.When(n.GetVerdictStaleSince())
	case len(missing) == 0:
		return ""
	}
	return "not proven: missing " + strings.Join(missing, ", ") + probeText(pr, n.GetHealth().GetProbe())
}

// probeText returns when recovery asks for the probe of a node, if it does.
func probeText(pr *output.Printer, p *recoveryv1.NodeProbe) string {
	switch {
	case p.GetDueAt() == nil:
		return ""
	case p.GetNote() != "":
		return fmt.Sprintf("; %s (%d so far), recovery asks again %s", p.GetNote(), p.GetFailed(), pr.When(p.GetDueAt()))
	}
	return "; recovery asks for a probe now"
}

func checklistText(pr *output.Printer, n *readmodelv1.Node) string {
	return strings.Join(kit.TextsOf(checklistOf(n), func(item *recoveryv1.HealthItem) string {
		if !item.GetPresent() {
			return human.Enum(item.GetCheck()) + ": missing, " + item.GetDetail()
		}
		return human.Enum(item.GetCheck()) + ": " + pr.When(item.GetObservedAt()) + ", " + item.GetDetail()
	}), "\n")
}

// itemText returns the detail of an item of the checklist.
func itemText(n *readmodelv1.Node, check recoveryv1.HealthCheck) string {
	for _, item := range checklistOf(n) {
		if item.GetCheck() == check {
			return item.GetDetail()
		}
	}
	return ""
}

// contractColumn returns what is known of one part of a node: what is wrong with it by the newest evidence that
// recovery has, or by that of its last verdict, otherwise the given text. Evidence that is over says nothing of now.
func contractColumn(title string, part commonv1.DriftPart, text func(*output.Printer, *readmodelv1.Node) string,
) output.Column[*readmodelv1.Node] {
	return output.Column[*readmodelv1.Node]{
		Title: "contract: " + title, Of: func(pr *output.Printer, n *readmodelv1.Node) string {
			if e := newestFault(n, part); e != nil {
				return strings.TrimSpace(human.Enum(e.GetReason()) + ", by " + human.Enum(e.GetSource()) + " " +
					pr.When(e.GetObservedAt()) + " " + e.GetDetail())
			}
			return text(pr, n)
		},
	}
}

// newestFault returns the newest evidence that something is wrong with a part of a node now, and before any other that
// of the reason of its verdict; nil if there is none.
func newestFault(n *readmodelv1.Node, part commonv1.DriftPart) *recoveryv1.Evidence {
	evidence, reason, now := n.GetVerdict().GetEvidence(), n.GetVerdict().GetReason(), time.Now()
	if health := n.GetHealth(); health != nil {
		evidence = health.GetParts()
		if at := health.GetAsOf(); at != nil {
			now = at.AsTime()
		}
	}
	var newest *recoveryv1.Evidence
	for _, e := range evidence {
		switch until := e.GetFreshUntil(); {
		case e.GetPart() != part || e.GetReason() == 0:
		case until != nil && until.AsTime().Before(now):
		case newest == nil || e.GetReason() == reason && newest.GetReason() != reason:
			newest = e
		case newest.GetReason() == reason && e.GetReason() != reason:
		case e.GetObservedAt().AsTime().After(newest.GetObservedAt().AsTime()):
			newest = e
		}
	}
	return newest
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
	text := serialText(pr, n)
	other := session.GetSerial() != "" && session.GetSerial() != id.GetCurrentSerial()
	return text + human.OnlyIf(n.GetConnected() && other, "; the session is on "+session.GetSerial())
}

// serialText returns a node's current certificate, and when it expires, or expired as recovery's clock has it.
func serialText(pr *output.Printer, n *readmodelv1.Node) string {
	id, now := n.GetIdentity(), n.GetHealth().GetAsOf()
	if id.GetCurrentSerial() == "" {
		return ""
	}
	verb := "expires "
	if now != nil && id.GetCertificateNotAfter().AsTime().Before(now.AsTime()) {
		verb = "expired "
	}
	return "serial " + id.GetCurrentSerial() + ", " + verb + pr.When(id.GetCertificateNotAfter())
}

// sessionText returns the state of the newest session of a node. An open one may not be served, as while no replica of
// nodeapi beats: the state that it has on record is then older than that.
func sessionText(n *readmodelv1.Node) string {
	session := n.GetSession()
	if session == nil {
		return ""
	}
	state := fmt.Sprintf("%s (generation %d)", human.Enum(session.GetState()), session.GetGeneration())
	if !n.GetConnected() && session.GetClosedAt() == nil {
		return "not served; on record as " + state
	}
	return state + human.OnlyIf(session.GetLate(), " late")
}

func tasksText(_ *output.Printer, n *readmodelv1.Node) string {
	texts := []string{human.OnlyIf(n.GetGate() != nil, "gate "+nodeWork(nil, n))}
	for _, check := range []recoveryv1.HealthCheck{
		recoveryv1.HealthCheck_HEALTH_CHECK_PROBE_COMPLETED,
		recoveryv1.HealthCheck_HEALTH_CHECK_NO_EXPIRED_TASK_CURRENT,
	} {
		if text := itemText(n, check); text != "" && !slices.Contains(texts, text) {
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

func countersText(_ *output.Printer, n *readmodelv1.Node) string {
	c := n.GetHealth().GetCounters()
	if c == nil {
		return ""
	}
	lines := []string{fmt.Sprintf("%s in the last day, %d of them in this enrolment; %s, %s",
		human.Counted(c.GetSessionsLastDay(), "session"), c.GetSessions(), human.Counted(c.GetMints(), "mint"),
		human.Counted(c.GetRefusedRegisters(), "refused register"))}
	for _, each := range c.GetVerdicts() {
		lines = append(lines, fmt.Sprintf("%s x%d", human.Enum(each.GetReason()), each.GetCount()))
	}
	return strings.Join(lines, "\n")
}

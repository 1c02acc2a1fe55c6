//! `doctor`: explains why instances do not progress, and repairs them.

use crate::{
    account::Account,
    confirm::confirm,
    instances::not_found,
    output::{escape, print_error, Output},
    times::{ago, parse_length},
    Outcome, Result,
};
use clap::Args;
use duroxide_cosmos::operate::{self, Diagnosis, Finding, Remedy};
use futures::{stream, StreamExt};
use indicatif::ProgressBar;
use serde_json::json;
use std::time::Duration;

/// The number of instances that are examined at once.
const CONCURRENCY: usize = 8;

#[derive(Args)]
pub struct Doctor {
    /// The instances to examine. Without ids: running instances without progress for a while (--unmoved), and instances
    /// with overdue work that no worker takes
    ids: Vec<String>,
    /// Examines instances without progress for this long
    #[arg(long, value_name = "LENGTH", value_parser = parse_length, default_value = "10m", conflicts_with = "all")]
    unmoved: Duration,
    /// Examines every instance and every history: reads the whole container
    #[arg(long, conflicts_with = "ids")]
    all: bool,
    /// Repairs what the history determines, after it has printed each repair and asked. Modifies data
    #[arg(long)]
    repair: bool,
    /// Does not ask
    #[arg(long, requires = "repair")]
    yes: bool,
}

/// The results of an examination.
#[derive(Default)]
struct Examination {
    examined: usize,
    /// The diagnoses with findings.
    with_findings: Vec<Diagnosis>,
    /// The number of instances that could not be read.
    failures: usize,
    /// The first instance that does not exist.
    missing: Option<String>,
}

impl Examination {
    fn fail(&mut self, id: &str, error: &impl ToString) {
        self.failures += 1;
        print_error(&format!("{} could not be examined: {}", escape(id), escape(&error.to_string())));
    }

    /// The outcome of the command. `is_healthy` says whether no examined instance has a finding left.
    fn outcome(&self, is_healthy: bool) -> Outcome {
        match &self.missing {
            Some(id) => not_found(id),
            None if is_healthy && self.failures == 0 => Outcome::Done,
            None => Outcome::Problem,
        }
    }
}

impl Doctor {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        let doctor = account.provider.doctor().await?;
        let examination = match self.ids.is_empty() {
            true => self.scan(&doctor, output).await?,
            false => self.examine_ids(&doctor, output).await,
        };
        let with_findings = &examination.with_findings;
        output.line(format!("examined {} instances: {} with findings", examination.examined, with_findings.len()));
        let findings = with_findings.iter().flat_map(|diagnosis| &diagnosis.findings);
        let repairable = findings.filter(|finding| is_repairable(finding)).count();
        if repairable == 0 {
            return Ok(examination.outcome(with_findings.is_empty()));
        }
        if !self.repair {
            output.line(format!("--repair repairs {repairable} of the findings"));
            return Ok(examination.outcome(false));
        }
        let instances = with_findings.iter().filter(|diagnosis| diagnosis.can_be_repaired()).count();
        let question = format!("Apply the {repairable} repairs to {instances} instances?");
        if !confirm(self.yes, &question, "leave --repair out")? {
            return Ok(Outcome::Declined);
        }
        let is_healthy = repair_all(&doctor, with_findings, output).await;
        Ok(examination.outcome(is_healthy))
    }

    /// Examines the instances that the scan returns.
    async fn scan(&self, doctor: &operate::Doctor, output: Output) -> anyhow::Result<Examination> {
        let mut examination = Examination::default();
        let bar = ProgressBar::new_spinner();
        let mut scan = doctor.scan(self.unmoved, self.all);
        while let Some(page) = scan.next().await? {
            examine_page(doctor, page, &mut examination, &bar, output).await;
        }
        bar.finish_and_clear();
        Ok(examination)
    }

    /// Examines the instances that the user named. An error of one instance does not stop the others.
    async fn examine_ids(&self, doctor: &operate::Doctor, output: Output) -> Examination {
        let mut examination = Examination::default();
        for id in &self.ids {
            match doctor.diagnose(id).await {
                Ok(Some(diagnosis)) => {
                    examination.examined += 1;
                    print_diagnosis(&diagnosis, output);
                    if !diagnosis.findings.is_empty() {
                        examination.with_findings.push(diagnosis);
                    }
                }
                Ok(None) => {
                    examination.missing.get_or_insert_with(|| id.clone());
                }
                Err(error) => examination.fail(id, &error),
            }
        }
        examination
    }
}

fn is_repairable(finding: &Finding) -> bool {
    matches!(finding.remedy, Remedy::Repair(_))
}

/// Examines a page of instances. An error of one instance does not stop the others.
async fn examine_page(
    doctor: &operate::Doctor,
    page: Vec<String>,
    examination: &mut Examination,
    bar: &ProgressBar,
    output: Output,
) {
    let mut diagnoses = stream::iter(page)
        .map(|id| async move {
            let diagnosis = doctor.diagnose(&id).await;
            (id, diagnosis)
        })
        .buffer_unordered(CONCURRENCY);
    while let Some((id, diagnosis)) = diagnoses.next().await {
        examination.examined += 1;
        bar.set_message(format!("examined {}", examination.examined));
        bar.tick();
        match diagnosis {
            // The instance was deleted in the meantime.
            Ok(None) => {}
            Ok(Some(diagnosis)) if diagnosis.findings.is_empty() => {}
            Ok(Some(diagnosis)) => {
                bar.suspend(|| print_diagnosis(&diagnosis, output));
                examination.with_findings.push(diagnosis);
            }
            Err(error) => bar.suspend(|| examination.fail(&id, &error)),
        }
    }
}

/// Prints the state of an instance, its findings and their remedies.
fn print_diagnosis(diagnosis: &Diagnosis, output: Output) {
    output.object("diagnosis", diagnosis);
    let Diagnosis { instance, name, status, updated_at, state, findings, .. } = diagnosis;
    let facts = [
        Some(name.clone()).filter(|name| !name.is_empty()),
        status.clone(),
        updated_at.map(|at| format!("last turn {}", ago(at))),
    ];
    let facts: Vec<String> = facts.into_iter().flatten().collect();
    let facts = if facts.is_empty() { String::new() } else { format!(" ({})", facts.join(", ")) };
    let healthy = if findings.is_empty() && !diagnosis.moves { "; nothing is wrong" } else { "" };
    output.line(escape(&format!("{instance}{facts}: {state}{healthy}")));
    for finding in findings {
        output.line(escape(&format!("  {}: {}", finding.reason, finding.detail)));
        output.line(escape(&match &finding.remedy {
            Remedy::Repair(repair) => format!("    repair: {repair}"),
            Remedy::ByHand(step) => format!("    by hand: {step}"),
            _ => String::new(),
        }));
    }
}

/// Repairs instances. Returns whether none of them has a finding left.
async fn repair_all(doctor: &operate::Doctor, with_findings: &[Diagnosis], output: Output) -> bool {
    let (mut is_healthy, mut count) = (true, 0);
    for diagnosis in with_findings {
        if !diagnosis.can_be_repaired() {
            is_healthy = false;
            continue;
        }
        match doctor.repair(diagnosis).await {
            Ok(repair) => {
                count += repair.done.len();
                is_healthy &= print_repair(&diagnosis.instance, &repair, output);
            }
            Err(error) => {
                let instance = escape(&diagnosis.instance);
                print_error(&format!("{instance} is not repaired: {}", escape(&error.to_string())));
                is_healthy = false;
            }
        }
    }
    output.line(format!("repaired {count} findings"));
    is_healthy
}

/// Prints the result of a repair. Returns whether the instance has no finding left.
fn print_repair(instance: &str, repair: &operate::Repair, output: Output) -> bool {
    let left = repair.after.as_ref().map_or(&[][..], |after| &after.findings);
    output.object(
        "repair",
        &json!({ "instance": instance, "done": repair.done, "hindered": repair.hindered, "left": left }),
    );
    for finding in &repair.done {
        output.line(escape(&format!("{instance}: repaired: {}", finding.detail)));
    }
    if let Some(reason) = &repair.hindered {
        output.line(escape(&format!("{instance}: not repaired: {reason}")));
    }
    for finding in left {
        output.line(escape(&format!("{instance}: still {}: {}", finding.reason, finding.detail)));
    }
    left.is_empty() && repair.hindered.is_none()
}

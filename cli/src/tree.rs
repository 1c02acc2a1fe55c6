//! `tree`: an instance with all its descendants.

use crate::{
    account::Account,
    instances::{instance_tree, not_found},
    output::{short, Output},
    Outcome, Result,
};
use clap::Args;
use duroxide_cosmos::operate::InstanceSummary;
use serde_json::json;
use std::collections::BTreeMap;

#[derive(Args)]
pub struct Tree {
    /// The instance
    id: String,
}

impl Tree {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        let Some(root) = account.provider.instance(&self.id).await? else { return Ok(not_found(&self.id)) };
        let mut children_of: BTreeMap<String, Vec<InstanceSummary>> = BTreeMap::new();
        for instance in instance_tree(account, &self.id).await? {
            if let Some(parent) = instance.parent.clone().filter(|_| instance.id != root.id) {
                children_of.entry(parent).or_default().push(instance);
            }
        }
        // A tree may be deep, so a loop with a stack replaces recursion.
        let mut next = vec![(root, 0)];
        while let Some((instance, depth)) = next.pop() {
            let mut object = json!(instance);
            object["depth"] = depth.into();
            output.object("instance", &object);
            let (name, status) = (short(&instance.name, 80), &instance.status);
            output.line(format!("{:indent$}{}  {name} {status}", "", short(&instance.id, 200), indent = depth * 2));
            let mut children = children_of.remove(&instance.id).unwrap_or_default();
            children.sort_by(|a, b| (b.created_at, &b.id).cmp(&(a.created_at, &a.id)));
            next.extend(children.into_iter().map(|child| (child, depth + 1)));
        }
        Ok(Outcome::Done)
    }
}

//! Advice for a denied request (401, 403). The substatus tells the reason.

use super::{
    error::{codes, describe, StoreError},
    ContainerLocation,
};
use azure_data_cosmos::CosmosError;

/// The reason for a denied request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DenialReason {
    /// The identity has no data plane role (403/5300 to 5303).
    Role,
    /// The account accepts no keys (403/5202, 5203).
    KeysDisabled,
    /// A network security perimeter blocks the caller (403/5307).
    Perimeter,
    /// Any other 403. Usually it comes from the account's firewall, which sends no substatus.
    Network,
    /// The key or the token is not valid for this account (401).
    Credential,
}

impl DenialReason {
    fn of(status: u16, substatus: u16) -> Self {
        match (status, substatus) {
            (403, 5300..=5303) => Self::Role,
            (403, 5202 | 5203) => Self::KeysDisabled,
            (403, 5307) => Self::Perimeter,
            (403, _) => Self::Network,
            _ => Self::Credential,
        }
    }
}

impl ContainerLocation {
    /// The error for a denied request, with advice for its reason.
    pub(super) fn denied(&self, error: &CosmosError) -> StoreError {
        let (status, substatus) = codes(error);
        self.denied_with(status, substatus, describe(error))
    }

    /// The error for a denied operation of a batch.
    pub(super) fn denied_with(&self, status: u16, substatus: u16, detail: String) -> StoreError {
        let advice = self.advice(DenialReason::of(status, substatus));
        StoreError::Denied { credential: self.credential.clone(), detail, advice }
    }

    fn advice(&self, reason: DenialReason) -> String {
        let account = self.account_name();
        match reason {
            DenialReason::Role => format!(
                "Assign the role 'Cosmos DB Built-in Data Contributor' to the identity: az cosmosdb sql role assignment \
                 create --account-name {account} --resource-group <group> --scope / --principal-id <object id> \
                 --role-definition-id 00000000-0000-0000-0000-000000000002"
            ),
            DenialReason::KeysDisabled => "The account accepts no keys (disableLocalAuth): sign in with Entra ID, for \
                 example COSMOS_CREDENTIAL=managed-identity"
                .to_owned(),
            DenialReason::Perimeter => format!(
                "A network security perimeter around {account} blocks this process: add an inbound access rule \
                 for its address or its managed identity"
            ),
            DenialReason::Network => format!(
                "The account's firewall or private endpoint settings most likely refuse this address: allow it with az \
                 cosmosdb update --name {account} --resource-group <group> --ip-range-filter <address>, or connect \
                 through the private endpoint. If the network is open, check the identity's role"
            ),
            DenialReason::Credential if self.signs_with_key() => format!(
                "Check that the key belongs to {account}, that it was not regenerated, and that this machine's clock \
                 is right"
            ),
            DenialReason::Credential => format!(
                "The account does not accept the token: check that the identity is in the tenant of {account}, that the \
                 cloud and the token scope fit the account, and that this machine's clock is right"
            ),
        }
    }

    fn signs_with_key(&self) -> bool {
        self.credential.contains("key") || self.credential.contains("connection string")
    }

    /// The account's name, as `az` expects it.
    pub(super) fn account_name(&self) -> &str {
        self.account.split('.').next().unwrap_or(&self.account)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn location(credential: &str) -> ContainerLocation {
        let (database, container) = ("db".to_owned(), "c".to_owned());
        ContainerLocation {
            account: "acc.documents.azure.com".to_owned(),
            database,
            container,
            credential: credential.to_owned(),
        }
    }

    #[test]
    fn each_substatus_has_its_own_advice() {
        let advice = |status, substatus| location("managed identity").advice(DenialReason::of(status, substatus));
        for role in 5300..=5303 {
            assert!(advice(403, role).contains("Data Contributor"), "{role}");
        }
        for keys in [5202, 5203] {
            assert!(advice(403, keys).contains("disableLocalAuth"), "{keys}");
        }
        assert!(advice(403, 5307).contains("perimeter"));
        assert!(advice(403, 0).contains("--ip-range-filter"));
        assert!(advice(401, 0).contains("tenant") && advice(401, 0).contains("clock"));
        assert!(location("account key").advice(DenialReason::of(401, 0)).contains("key belongs to acc"));
    }
}

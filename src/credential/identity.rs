//! Managed identities and workload identities.

use azure_core::{credentials::TokenCredential, http::ClientOptions};
use azure_identity::{
    ClientAssertionCredentialOptions, ManagedIdentityCredential, ManagedIdentityCredentialOptions, UserAssignedId,
    WorkloadIdentityCredential, WorkloadIdentityCredentialOptions,
};
use std::{borrow::Cow, path::PathBuf, sync::Arc};

/// The managed identity to use. A host may have several.
///
/// ```
/// use duroxide_cosmos::{Credential, ManagedIdentity};
///
/// let credential = Credential::ManagedIdentity(ManagedIdentity::ObjectId("my-object-id".into()));
/// assert_eq!(credential.kind(), "managed identity (user-assigned, object id my-object-id)");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ManagedIdentity {
    /// The host's own identity.
    #[default]
    SystemAssigned,
    /// The user-assigned identity with this client id.
    ClientId(String),
    /// The user-assigned identity with this object (principal) id.
    ObjectId(String),
    /// The user-assigned identity with this Azure resource id. App Service and Container Apps don't support it.
    ResourceId(String),
}

/// A workload identity. The webhook of Kubernetes sets variables, which are the defaults of these fields.
///
/// ```
/// use duroxide_cosmos::{Credential, WorkloadIdentity};
///
/// let identity = WorkloadIdentity::default().with_client_id("my-client-id");
/// assert_eq!(Credential::WorkloadIdentity(identity).kind(), "workload identity (client id my-client-id)");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkloadIdentity {
    /// The client id. The default is `AZURE_CLIENT_ID`.
    pub client_id: Option<String>,
    /// The tenant id. The default is `AZURE_TENANT_ID`.
    pub tenant_id: Option<String>,
    /// The file with the token of the service account. The default is `AZURE_FEDERATED_TOKEN_FILE`.
    pub token_file: Option<PathBuf>,
}

impl WorkloadIdentity {
    /// Sets the client id.
    #[must_use]
    pub fn with_client_id(mut self, client_id: impl Into<String>) -> Self {
        self.client_id = Some(client_id.into());
        self
    }

    /// Sets the tenant id.
    #[must_use]
    pub fn with_tenant_id(mut self, tenant_id: impl Into<String>) -> Self {
        self.tenant_id = Some(tenant_id.into());
        self
    }

    /// Sets the file with the service account's token.
    #[must_use]
    pub fn with_token_file(mut self, token_file: impl Into<PathBuf>) -> Self {
        self.token_file = Some(token_file.into());
        self
    }

    pub(super) fn build(&self, client_options: ClientOptions) -> azure_core::Result<Arc<dyn TokenCredential>> {
        let options = WorkloadIdentityCredentialOptions {
            credential_options: ClientAssertionCredentialOptions { client_options },
            client_id: self.client_id.clone(),
            tenant_id: self.tenant_id.clone(),
            token_file_path: self.token_file.clone(),
        };
        Ok(WorkloadIdentityCredential::new(Some(options))?)
    }
}

impl ManagedIdentity {
    pub(super) fn build(&self, client_options: ClientOptions) -> azure_core::Result<Arc<dyn TokenCredential>> {
        let user_assigned_id = match self {
            Self::SystemAssigned => None,
            Self::ClientId(id) => Some(UserAssignedId::ClientId(id.clone())),
            Self::ObjectId(id) => Some(UserAssignedId::ObjectId(id.clone())),
            Self::ResourceId(id) => Some(UserAssignedId::ResourceId(id.clone())),
        };
        let options = ManagedIdentityCredentialOptions { user_assigned_id, client_options };
        Ok(ManagedIdentityCredential::new(Some(options))?)
    }
}

impl ManagedIdentity {
    pub(super) fn kind(&self) -> Cow<'static, str> {
        let (by, id) = match self {
            Self::SystemAssigned => return "managed identity (system-assigned)".into(),
            Self::ClientId(id) => ("client id", id),
            Self::ObjectId(id) => ("object id", id),
            Self::ResourceId(id) => ("resource id", id),
        };
        format!("managed identity (user-assigned, {by} {id})").into()
    }
}
